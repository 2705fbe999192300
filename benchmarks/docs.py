"""Faults of the documentation site in a real browser: pages too wide, clipped blocks, errors and dead links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

from benchmarks._browser import Browser, browser, browser_path

ROOT = Path(__file__).parents[1]
WIDTHS = (390, 768, 1280)
"""A telephone, a tablet and a small laptop, in pixels."""
WIDE = "Math.max(0, document.documentElement.scrollWidth - innerWidth)"
CLIPPED = """[...document.querySelectorAll("article table, article pre, article img, article svg, article p")]
    .filter(e => e.checkVisibility() && !e.closest("svg svg"))
    .filter(e => {
        const box = e.getBoundingClientRect();
        let around = e.parentElement;
        while (around && getComputedStyle(around).overflowX === "visible") around = around.parentElement;
        return around && !["auto", "scroll"].includes(getComputedStyle(around).overflowX)
            && box.right > around.getBoundingClientRect().right + 1;
    }).map(e => e.outerHTML.slice(0, 80))"""
LINKS = '[...document.querySelectorAll("a[href]")].map(e => e.href).filter(to => to.startsWith(origin))'
ERRORS = {"Log.entryAdded", "Runtime.exceptionThrown"}
MISSING = "there is no browser on this machine; install Chromium (on Debian: apt install chromium)"


def run(quick: bool = False) -> dict[str, Any]:
    """Return the number of faults of all pages at all widths; with `quick`, of the pages beside the start page."""
    program = browser_path()
    if program is None:
        return {"name": "docs", "value": None, "goal": "0 faults", "ok": False, "details": {"missing": MISSING}}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        build(site)
        pages = sorted(site.glob("*.html" if quick else "**/*.html"))
        with served(site) as address, browser(program) as shown:
            faults = [fault for page in pages for fault in faults_of(shown, page.relative_to(site), site, address)]
    return {
        "name": "docs",
        "value": len(faults),
        "goal": f"0 faults at {', '.join(map(str, WIDTHS))} px",
        "ok": not faults and bool(pages),
        "details": {"pages": len(pages), "faults": faults[:100]},
    }


def build(site: Path) -> None:
    """Build the site; a warning is an error, as a dead link or a page that is in no list."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, stdout=sys.stderr, check=True, timeout=600
    )


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler of requests that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Generator[str]:
    """Serve a folder to this machine only, and yield the address."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def faults_of(shown: Browser, name: Path, site: Path, address: str) -> Iterator[str]:
    """Yield the faults of one page."""
    for width in WIDTHS:
        shown.open(f"{address}{name}", width)
        if excess := shown.value(WIDE):
            yield f"{name} at {width} px: {excess} px too wide"
        for element in shown.value(CLIPPED):
            yield f"{name} at {width} px: clipped: {element}"
    for event in shown.events:
        if event["method"] in ERRORS:
            yield f"{name}: {str(event['params'])[:200]}"
    for link in sorted(set(shown.value(LINKS))):
        target = re.sub(r"[#?].*", "", unquote(link).removeprefix(address))
        if not (site / target).exists():
            yield f"{name}: dead link to {target}"
