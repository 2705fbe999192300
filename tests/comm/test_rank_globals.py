"""Each simulated rank has its own values of assigned globals and class attributes, like a process."""

from __future__ import annotations

import sys
from importlib import reload
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from meshwright.comm import current_communicator, simulate

STEP = 0
SEEN: list[int] = []


class Counter:
    total = 0
    ranks: ClassVar[list[int]] = []

    def count(self) -> int:
        Counter.total += 1
        return Counter.total


class Shared:
    """A class whose instances all share the dict of the class, as in Accelerate."""

    _state: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self._state


def meet() -> None:
    current_communicator().all_reduce(torch.ones(1), "sum", (0, 1))


def step() -> int:
    global STEP  # noqa: PLW0603 - the test is about assigned globals
    STEP += 1
    meet()
    return STEP


def test_each_rank_has_its_own_globals() -> None:
    assert simulate(lambda: [step() for _ in range(3)], 2) == [[1, 2, 3]] * 2
    assert STEP == 3


def test_an_import_between_two_steps_changes_no_global(monkeypatch: pytest.MonkeyPatch) -> None:
    def go() -> list[int]:
        first = step()
        name = f"loaded_on_rank_{current_communicator().rank}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        return [first, step(), step()]

    before = STEP
    assert simulate(go, 2) == [[before + 1, before + 2, before + 3]] * 2


def test_each_rank_has_its_own_class_attributes() -> None:
    def go() -> list[int]:
        found = []
        for _ in range(3):
            found.append(Counter().count())
            meet()
        return found

    assert simulate(go, 2) == [[1, 2, 3]] * 2
    assert Counter.total == 3
    Counter.total = 0


def test_each_rank_has_its_own_shared_state_of_instances() -> None:
    def go() -> Any:
        Shared().rank = current_communicator().rank
        meet()
        mine = Shared()
        mine.more = getattr(mine, "more", 0) + 1
        meet()
        return Shared().rank, Shared().more

    assert simulate(go, 2) == [(0, 1), (1, 1)]
    assert Shared().rank == 0
    Shared._state.clear()


def test_results_are_collected_in_one_list() -> None:
    SEEN.clear()
    simulate(lambda: (meet(), SEEN.append(current_communicator().rank)), 2)
    assert sorted(SEEN) == [0, 1]


def test_a_failure_leaves_no_values_of_other_ranks() -> None:
    before = STEP

    def go() -> None:
        step()
        if current_communicator().rank == 1:
            raise ValueError

    try:
        simulate(go, 2)
    except ValueError:
        pass
    assert STEP in (before, before + 1)


SOURCE = """
COUNT = {}

def read():
    return COUNT
{}
"""
ASSIGNS = """
def count():
    global COUNT
    COUNT += 1
"""


def test_globals_of_a_module_that_changed_or_was_loaded_again_belong_to_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "module_that_changes.py"
    path.write_text(SOURCE.format(0, "def count(): pass"))
    import module_that_changes as module  # pyright: ignore[reportMissingImports]

    def go() -> int:
        for _ in range(3):
            module.count()
            meet()
        return module.read()

    assert simulate(go, 2) == [0, 0]
    path.write_text(SOURCE.format(5, ASSIGNS))
    reload(module)
    assert simulate(go, 2) == [8, 8]
    exec("def add():\n    global MORE\n    MORE = globals().get('MORE', 0) + 1\n    return MORE", vars(module))

    def more() -> int:
        meet()
        return module.add()

    module.MORE = 1
    assert simulate(more, 2) == [2, 2]
