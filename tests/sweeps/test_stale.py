"""No kind of change between steps of a static training may give the old number: a part of the figure `stale`."""

from __future__ import annotations

import pytest

from benchmarks import stale
from benchmarks._stale_case import Kind

pytest.importorskip("transformers")
pytest.importorskip("peft")

FACTORS = (1.0, 1.0, 2.0, 2.0)
"""One change, before the third step. The figure also changes the setting back."""
PART = [k for k in stale.KINDS.values() if not k.by_loss][::5]


@pytest.mark.parametrize("kind", [pytest.param(k, id=k.name) for k in PART])
def test_a_change_is_detected_or_refused(kind: Kind) -> None:
    found = stale.examine(kind, FACTORS)
    if "disable_global_flags" in found.message:
        pytest.skip("another test has imported what forbids to set flags")
    if found.outcome == stale.BROKEN:
        raise ValueError(found.message)
    assert found.outcome in (stale.RIGHT, stale.REFUSED), found.message
