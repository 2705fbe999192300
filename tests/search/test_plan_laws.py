"""Laws of plans over random models, clusters and sizes; `python -m benchmarks laws` tries thousands more."""

from __future__ import annotations

import pytest

from benchmarks.laws import LAWS, broken, published_runs_that_do_not_fit

FEW = {"the best is the best printed": 4, "time is monotone": 15, "memory is monotone": 25}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_holds_for_random_cases(name: str) -> None:
    law, _ = LAWS[name]
    _, wrong = broken(law, range(FEW.get(name, 60)))
    assert not wrong, "\n".join(wrong[:5])


def test_published_runs_that_ran_fit_into_memory() -> None:
    assert not list(published_runs_that_do_not_fit())
