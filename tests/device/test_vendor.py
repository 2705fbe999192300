"""A vendor's platform of at most 40 lines, from an entry point, passes checks of conformance between two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshwright.comm import launch
from tests.device import _vendor_program as program
from tests.device.build import build
from tests.test_layers import Source, count_code_lines

VENDOR = Path(__file__).parent / "vendor"
MOST_LINES = 40


def test_the_platform_is_short() -> None:
    path = VENDOR / "made_up_vendor.py"
    assert count_code_lines(Source(path.name, path.read_text())) <= MOST_LINES


def test_the_page_shows_the_platform() -> None:
    page = (VENDOR.parents[2] / "docs" / "how-to" / "bring-your-device.md").read_text()
    assert (VENDOR / "made_up_vendor.py").read_text() in page


def test_its_transport_passes_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks conformance` runs all checks of levels 0 to 4."""
    build()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(VENDOR), str(VENDOR.parents[2])]), prepend=os.pathsep)
    assert launch([program.__file__, str(tmp_path)], 2, timeout=100) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["device"] == "mesh"
        assert found["faults"] == {}
        assert found["checks"] >= program.FEWEST
