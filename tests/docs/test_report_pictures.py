"""The pictures of the report are of current pages: `make pictures` makes them, in Chromium."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from benchmarks.report import WIDTHS

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import report_pictures


@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_is_current(width: int) -> None:
    png = report_pictures.file_of(width).read_bytes()
    assert struct.unpack(">I", png[16:20])[0] == width
    assert report_pictures.writer().encode() in png, "the page has changed: make pictures"
