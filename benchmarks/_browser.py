"""A headless browser, controlled over a pair of pipes with the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0
"""Seconds to wait for a response."""
KEPT_EVENTS = {"Network.requestWillBeSent", "Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
"""Events that are kept."""


class BrowserError(Exception):
    """An error of the browser, or its unexpected end."""


def browser_path() -> str | None:
    """Return the path of this machine's browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    """One page of a browser: sends commands, and keeps the events that occurred since the page was opened."""

    requests: int
    responses: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _number: int = 0
    _loads: int = 0
    _unread: bytes = b""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return the browser's response."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        os.write(
            self.requests, json.dumps(asked | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int, dark: bool = False, height: int = 900) -> None:
        """Load a page in a window of this width and height, and wait until it is complete."""
        self.events.clear()
        self.window(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        before = self._loads
        self.send("Page.navigate", url=url)
        while self._loads == before:
            self._next()

    def window(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression as data."""
        got = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise BrowserError(str(got["exceptionDetails"]))
        return got["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **told, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **told)

    def picture(self, width: int, most: int) -> bytes:
        """Return a picture of the page as PNG, from its top to at most `most` pixels of height."""
        high = min(most, int(self.value("document.documentElement.scrollHeight")))
        self.window(width, high)
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        """Return the next message; events are also kept."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            if not select.select([self.responses], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"no answer for {PATIENCE:g} s")
            read = os.read(self.responses, 1 << 20)
            if not read:
                raise BrowserError("the browser has ended")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._loads += message.get("method") == "Page.loadEventFired"
        if message.get("method") in KEPT_EVENTS:
            self.events.append(message)
        return message


@contextmanager
def browser(path: str) -> Generator[Browser]:
    """Yield a new browser with one page and an empty profile folder; it is closed when the context ends."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        line = 'in=$1 out=$2; shift 2; eval "exec \\"\\$@\\" 3<&$in 4>&$out"'
        ours = (str(to_browser[0]), str(from_browser[1]))
        words = [path, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", line, "bash", *ours, *words],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield _page(Browser(to_browser[1], from_browser[0]))
        finally:
            os.close(to_browser[1])  # the browser ends with its pipe
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser[0])


def _page(made: Browser) -> Browser:
    target = made.send("Target.createTarget", url="about:blank")["targetId"]
    made.session = made.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "DOM"):
        made.send(f"{domain}.enable")
    return made
