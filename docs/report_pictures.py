"""Shows the report in Chromium, wide and narrow, and keeps pictures of it: `make pictures`."""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
import zlib
from pathlib import Path

from benchmarks._browser import browser, found
from benchmarks.report import MISSING, WIDTHS, evil, written
from meshwright.report import page

PICTURES = Path(__file__).parent / "pictures"
MOST = {1280: 2030, 400: 1500}
"""So many pixels from the top are shown."""
BY = b"Software"
"""The text in a PNG file that names what made it."""


def file_of(width: int) -> Path:
    return PICTURES / f"report-{width}.png"


def writer() -> str:
    """A mark of what writes pages now: of a page whose numbers do not change."""
    return hashlib.sha256(page(evil()).encode()).hexdigest()


def with_writer(png: bytes) -> bytes:
    """The picture with the mark in it, before its end."""
    told = BY + b"\0" + writer().encode()
    chunk = struct.pack(">I", len(told)) + b"tEXt" + told + struct.pack(">I", zlib.crc32(b"tEXt" + told))
    return png[:-12] + chunk + png[-12:]


def main() -> int:
    """1 where there is no browser."""
    path = found()
    if path is None:
        print(MISSING, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, browser(path) as b:
        report = written(Path(folder))["command line"]
        for width in WIDTHS:
            b.open(report.as_uri(), width)
            file_of(width).write_bytes(with_writer(b.picture(width, MOST[width])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
