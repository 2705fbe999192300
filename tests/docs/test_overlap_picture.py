"""The picture of overlapped steps is that of the steps of today."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.device.inspection import Devices

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import overlap_picture


def test_the_picture_is_that_of_the_steps(mesh_device: Devices) -> None:
    drawn = overlap_picture.svg(overlap_picture.steps(mesh_device))
    assert overlap_picture.PICTURE.read_text(encoding="utf-8") == drawn, "the steps have changed: make pictures"
