"""The work after the microbatches: once per step, or after each group of microbatches in an asynchronous schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.graph import GradientInspector, Input, InspectedStep, Program, Run, Value, runner, split_before_update
from meshwright.layout import TorchValue

from ..partition.epilogue import MicrobatchSum
from .weight_stash import Known

ProgramMaker = Callable[[Program], tuple[Run, tuple[Value, ...]]]
"""Compiles a program to a function. Also returns the inputs whose new values that function returns.

The function may write to other inputs itself.
"""


def interpreter(program: Program) -> tuple[Run, tuple[Value, ...]]:
    """Return a function that runs the program node by node, and the inputs that the program writes."""
    return runner(program), tuple(x for x, _ in program.writes)


@dataclass(frozen=True, slots=True)
class CompiledUpdate:
    """A program that runs after the microbatches, as a function.

    `reads` are its arguments. It changes the inputs `over`, and returns new values for the inputs `written`.
    `apart` is the program with the update as a separate part, if it can be split.
    """

    run: Run
    reads: tuple[Any, ...]
    written: tuple[Value, ...]
    over: tuple[Value, ...]
    apart: InspectedStep | None = None

    @classmethod
    def of(cls, program: Program, make: ProgramMaker, looks: bool = False) -> CompiledUpdate:
        """Return the function of a program; with `looks`, gradients can be looked at before the update."""
        run, written = make(program)
        reads = tuple(i.source if i.role == "saved" else i.value for i in program.inputs)
        return cls(
            run, reads, written, tuple(x for x, _ in program.writes), split_before_update(program) if looks else None
        )

    def __call__(
        self, base: Known, totals: Known, look_at: GradientInspector | None = None
    ) -> tuple[Any, list[Any] | None]:
        """Return the outputs and the values to write; None for these if `look_at` says to leave the update out."""
        given = [totals[v.of] if isinstance(v, MicrobatchSum) else base[v] for v in self.reads]
        return self.run(*given) if look_at is None or self.apart is None else self.apart(given, look_at)


class StepUpdates:
    """The `count` updates of a step.

    A single update returns the values to write. Several updates each write to their inputs in place. With `again`, all
    updates but the first run that program; it reads the optimizer states that the first update makes.
    With `looks`, gradients can be looked at before a single update.
    """

    def __init__(
        self, first: Program, again: Program | None, count: int, make: ProgramMaker, looks: bool = False
    ) -> None:
        update = CompiledUpdate.of(first, make, looks and count == 1)
        self.looks = update.apart is not None
        self._updates = [update, *[CompiledUpdate.of(again, make) if again else update] * (count - 1)]
        self._made = {i.value: i.source for i in _made_by(first, again)}
        self.inputs: tuple[Input, ...] = tuple(
            i for i in (again.inputs if again else ()) if i.role != "saved" and i.value not in self._made
        )
        """Inputs that only later updates read and that no earlier update makes."""
        self.writes = update.written if count == 1 else ()

    def over(self, at: int, base: Known) -> list[Tensor]:
        """Return the tensors that update number `at` writes to."""
        return [base[x] for x in self._updates[at].over]

    def __call__(
        self, at: int, base: Known, totals: Known, look_at: GradientInspector | None = None
    ) -> tuple[Any, list[Any] | None]:
        """Run update number `at`; return its outputs and the values of `writes`, None if `look_at` skips it."""
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
    """Return the optimizer states that are inputs of `again` and outputs of `first`."""
    made = first.outputs.get("state", {}) if again else {}
    return [i for i in (again.inputs if again else ()) if i.role == "state" and i.source in made]


def mean_of(outputs: Sequence[TorchValue]) -> TorchValue:
    """Return the outputs of the first update, with the mean loss of all updates."""
    first, *others = outputs
    if not others:
        return first
    return {**first, "out": sum((o["out"] for o in others), first["out"]) / len(outputs)}
