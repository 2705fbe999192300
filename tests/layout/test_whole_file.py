"""Files are written whole: links stay, and pipes are written directly."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.layout import write_whole


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        write_whole(pipe, b"told")
        assert read.result(timeout=60) == b"told"
    assert pipe.is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
