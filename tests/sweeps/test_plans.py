"""A part of the figure `plans`: no call gets the plan of a call with other numbers, or under another setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import plans
from benchmarks._samples import Entry

ENTRIES = plans.functionals()[::3] + plans.entries()[::120]


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """Save and restore the global generator, from which samples are drawn."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_call_gets_the_plan_of_its_own_numbers_and_settings(entry: Entry) -> None:
    assert not plans.failures_of(entry, quick=True)


def test_the_walk_finds_a_plan_that_forgets_a_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are cached by type only: dropout with 0.0 is the identity."""
    monkeypatch.setattr("meshwright.tensor.execution.dispatch.floats_in", lambda args, kwargs: ())
    (entry,) = [e for e in plans.functionals() if e.name == "alpha_dropout"]
    assert plans.failures_of(entry, quick=True)
