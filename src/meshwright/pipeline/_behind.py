"""What is done behind microbatches: once per step, or behind each group of them where a schedule is asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.graph import Input, LookAt, Looking, Program, Run, Value, in_two, runner

from ._sums import Total
from ._versions import Known

Make = Callable[[Program], tuple[Run, tuple[Value, ...]]]
"""Gives a program as a function, and the inputs for which that gives values to write; it may write others itself."""


def plainly(program: Program) -> tuple[Run, tuple[Value, ...]]:
    """The program node by node."""
    return runner(program), tuple(x for x, _ in program.writes)


@dataclass(frozen=True, slots=True)
class Update:
    """A program behind microbatches as a function; it changes the inputs `over`, and gives values for `written`.

    `apart` is the program with the update as a part of its own, if that can be had.
    """

    run: Run
    reads: tuple[Any, ...]
    written: tuple[Value, ...]
    over: tuple[Value, ...]
    apart: Looking | None = None

    @classmethod
    def of(cls, program: Program, make: Make, looks: bool = False) -> Update:
        """Return the function of a program; with `looks`, gradients can be looked at before the update."""
        run, written = make(program)
        reads = tuple(i.source if i.role == "saved" else i.value for i in program.inputs)
        return cls(run, reads, written, tuple(x for x, _ in program.writes), in_two(program) if looks else None)

    def __call__(self, base: Known, totals: Known, look_at: LookAt | None = None) -> tuple[Any, list[Any] | None]:
        """Return the outputs and the values to write; None for these if `look_at` says to leave the update out."""
        given = [totals[v.of] if isinstance(v, Total) else base[v] for v in self.reads]
        return self.run(*given) if look_at is None or self.apart is None else self.apart(given, look_at)


class Behind:
    """`count` updates: one, whose values to write are given out, or several, each of which writes over its inputs.

    With `again`, all but the first are those of that program; it reads the states that the first one makes. With
    `looks`, gradients can be looked at before a single update.
    """

    def __init__(self, first: Program, again: Program | None, count: int, make: Make, looks: bool = False) -> None:
        update = Update.of(first, make, looks and count == 1)
        self.looks = update.apart is not None
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

    def __call__(
        self, at: int, base: Known, totals: Known, look_at: LookAt | None = None
    ) -> tuple[Any, list[Any] | None]:
        """Return the outputs of update number `at`, and the values of `writes`; None if `look_at` leaves it out."""
        update = self._updates[at]
        outputs, written = update(base, totals, look_at)
        if len(self._updates) == 1 or written is None:
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
