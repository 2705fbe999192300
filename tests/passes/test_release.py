"""Early release: the same bits, gradients that are not in memory together, and in-place updates."""

from __future__ import annotations

import pytest

from meshwright.graph import alias_classes, communication, live_memory
from meshwright.passes import Foreach, InPlace, Recompute, Release

from .steps import assert_same, llama_step


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2)])
def test_a_step_keeps_its_bits(shape: tuple[int, int, int]) -> None:
    step = llama_step(shape)
    programs = step.changed(Release())
    assert_same(step, programs)
    assert_same(step, step.changed(lambda p: InPlace()(Release()(p))))
    for before, after in zip(step.programs, programs, strict=True):
        assert [n.op for n in communication(after)] == [n.op for n in communication(before)]


def test_one_gradient_lives_at_a_time() -> None:
    program = llama_step((1, 1, 1)).programs[0]
    released = Release()(program)
    parameters = [i.value.nbytes for i in program.inputs if i.role == "parameter"]
    (told,) = [c for c in released.changes if c.by == "release"]
    assert told.saved["bytes"] == sum(parameters) - max(parameters)


def test_updates_are_still_in_place() -> None:
    program = InPlace()(Release()(llama_step((1, 1, 1)).programs[0]))
    found = alias_classes(program)
    assert all(found.of(x) is found.of(v) for x, v in program.writes)


def test_with_recompute_the_peak_falls() -> None:
    program = llama_step((1, 1, 1)).programs[0]
    again = Recompute(("blocks.*",))(program)
    late, early = (live_memory(InPlace()(p)).peak for p in (again, Release()(again)))
    assert early < late


def test_a_grouped_update_cannot_be_released_early() -> None:
    program = Foreach()(llama_step((1, 1, 1)).programs[0])
    released = Release()(program)
    assert live_memory(released).peak >= live_memory(program).peak - 1
