"""The fast comparison of guards: it holds while nothing changes, also for getters that make a new object each time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshwright.graph.guards.fast_comparison import FastComparison
from meshwright.graph.guards.slots import GetterSlot


def test_a_getter_that_makes_an_object_at_each_reading_does_not_fail_the_comparison() -> None:
    owner = SimpleNamespace(number=10**20, held=object())

    def computed(x: Any) -> int:
        return x.number + 1

    fast = FastComparison([GetterSlot("computed", owner, computed), GetterSlot("held", owner, lambda x: x.held)])
    assert fast.holds()
    owner.number += 1
    assert not fast.holds()
    owner.number -= 1
    assert fast.holds()
    owner.held = object()
    assert not fast.holds()
