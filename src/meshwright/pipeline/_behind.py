"""What is done behind microbatches: once per step, or behind each group of them where a schedule is asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.graph import Input, Program, Run, Value, runner

from ._sums import Total
from ._versions import Known

Make = Callable[[Program], tuple[Run, tuple[Value, ...]]]
"""Gives a program as a function, and the inputs for which that gives values to write; it may write others itself."""


def plainly(program: Program) -> tuple[Run, tuple[Value, ...]]:
    """The program node by node."""
    return runner(program), tuple(x for x, _ in program.writes)


@dataclass(frozen=True, slots=True)
class Update:
    """A program behind microbatches as a function; it changes the inputs `over`, and gives values for `written`."""

    run: Run
    reads: tuple[Any, ...]
    written: tuple[Value, ...]
    over: tuple[Value, ...]

    @classmethod
    def of(cls, program: Program, make: Make) -> Update:
        run, written = make(program)
        reads = tuple(i.source if i.role == "saved" else i.value for i in program.inputs)
        return cls(run, reads, written, tuple(x for x, _ in program.writes))

    def __call__(self, base: Known, totals: Known) -> tuple[Any, list[Any]]:
        return self.run(*(totals[v.of] if isinstance(v, Total) else base[v] for v in self.reads))


class Behind:
    """`count` updates: one, whose values to write are given out, or several, each of which writes over its inputs.

    With `again`, all but the first are those of that program; it reads the states that the first one makes.
    """

    def __init__(self, first: Program, again: Program | None, count: int, make: Make) -> None:
        update = Update.of(first, make)
        self._updates = [update, *[Update.of(again, make) if again else update] * (count - 1)]
        self._made = {i.value: i.source for i in _made_by(first, again)}
        self.inputs: tuple[Input, ...] = tuple(
            i for i in (again.inputs if again else ()) if i.role != "saved" and i.value not in self._made
        )
        """What later updates are given from outside."""
        self.writes = update.written if count == 1 else ()

    def over(self, at: int, base: Known) -> list[Tensor]:
        """What update number `at` writes over."""
        return [base[x] for x in self._updates[at].over]

    def __call__(self, at: int, base: Known, totals: Known) -> tuple[Any, list[Any]]:
        """The outputs of update number `at`, and the values of `writes`."""
        update = self._updates[at]
        outputs, written = update(base, totals)
        if len(self._updates) == 1:
            return outputs, written
        for x, value in zip(update.written, written, strict=True):
            base[x].copy_(value)
        if at == 0:
            base.update({v: outputs["state"][key] for v, key in self._made.items()})
        return outputs, []


def _made_by(first: Program, again: Program | None) -> list[Input]:
    """The inputs of `again` that are states which `first` makes."""
    made = first.outputs.get("state", {}) if again else {}
    return [i for i in (again.inputs if again else ()) if i.role == "state" and i.source in made]


def mean_of(outputs: Sequence[Any]) -> Any:
    """The outputs of several updates as those of one step, whose loss is the mean of theirs."""
    first, *others = outputs
    return {**first, "out": sum((o["out"] for o in others), first["out"]) / len(outputs)} if others else first
