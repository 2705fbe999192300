"""The log of a run: a file system that does not answer delays no step, and is reported at the end."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest

from meshwright.engine.training import log_file as log_file_module
from meshwright.engine.training.log_file import LogFile, log_file


class Hanging(io.StringIO):
    """A file whose writes hang until `forever` is set."""

    name = "run/log.jsonl"

    def __init__(self) -> None:
        super().__init__()
        self.forever = threading.Event()

    def write(self, text: str, /) -> int:
        self.forever.wait(60)
        return len(text)


def test_a_hanging_file_delays_no_step_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_WRITE_TIMEOUT", "0.1")
    file = Hanging()
    log, begin = LogFile(file), time.monotonic()
    with pytest.warns(RuntimeWarning) as told:
        _write(log, 20_000)
    assert time.monotonic() - begin < 5
    assert {str(each.message) for each in told} == {
        "the log run/log.jsonl misses a line: no answer from the file system",
        "the log run/log.jsonl misses a line: no answer from the file system for 0.1 s",
    }
    file.forever.set()


def _write(log: LogFile, steps: int) -> None:
    for step in range(steps):
        log({"event": "step", "step": step})
    log.close()


class Late(Hanging):
    """A file whose first write has `begun`, and ends when the run closes its log."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def write(self, text: str, /) -> int:
        self.begun.set()
        return super().write(text)


def test_a_full_queue_at_the_end_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file_module, "_MOST_LINES", 2)
    file, begin = Late(), time.monotonic()
    log = LogFile(file)
    log({"event": "step"})
    file.begun.wait()
    for _ in range(2):
        log({"event": "step"})
    threading.Timer(0.1, file.forever.set).start()
    log.close()
    assert file.closed
    assert time.monotonic() - begin < 30


class Full(Hanging):
    """A file on a full disk."""

    def write(self, text: str, /) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_reported_and_does_not_end_the_run() -> None:
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        _write(LogFile(Full()), 3)


def test_all_lines_are_in_the_file_at_the_end(tmp_path: Path) -> None:
    with log_file(tmp_path / "run" / "log.jsonl") as log:
        for step in range(100):
            log({"event": "step", "step": step, "loss": float("nan")})
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(100))
    assert json.loads(lines[0])["loss"] == "nan"
