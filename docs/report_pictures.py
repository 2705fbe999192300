"""Pictures of the report in Chromium, wide and narrow: `make pictures`."""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
import zlib
from pathlib import Path

from benchmarks._browser import browser, browser_path
from benchmarks.report import MISSING, WIDTHS, hostile_account, written_pages
from meshwright.report import page

PICTURES = Path(__file__).parent / "pictures"
MOST = {1280: 2030, 400: 1500}
"""Width → height of the picture, in pixels from the top of the page."""
BY = b"Software"
"""Key of the text in a PNG file that names the version of its maker."""


def file_of(width: int) -> Path:
    return PICTURES / f"report-{width}.png"


def writer() -> str:
    """Return a checksum of a page with fixed numbers, which changes with the code that writes pages."""
    return hashlib.sha256(page(hostile_account()).encode()).hexdigest()


def with_writer(png: bytes) -> bytes:
    """Return the picture with that checksum in a text before its end."""
    told = BY + b"\0" + writer().encode()
    chunk = struct.pack(">I", len(told)) + b"tEXt" + told + struct.pack(">I", zlib.crc32(b"tEXt" + told))
    return png[:-12] + chunk + png[-12:]


def main() -> int:
    """Write the pictures; return 1 if there is no browser."""
    path = browser_path()
    if path is None:
        print(MISSING, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, browser(path) as b:
        report = written_pages(Path(folder))["command line"]
        for width in WIDTHS:
            b.open(report.as_uri(), width)
            file_of(width).write_bytes(with_writer(b.picture(width, MOST[width])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
