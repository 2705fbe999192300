"""Plans apart from their collective, so that the collective can run beside other work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ._execute import Act, Transfer
from ._mover import Mover, OutMover, Shape


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A plan on one rank: local actions, one collective, and local actions behind it."""

    before: tuple[Act, ...]
    transfer: Transfer
    after: tuple[Act, ...]

    def prepared(self, local: Tensor, communicator: OutMover) -> PreparedConversion:
        """Run the local actions before the collective, and allocate its results."""
        x = _run(self.before, local, communicator)
        return PreparedConversion(self, x, self.transfer.pack(x), self.transfer.results(x), communicator)


@dataclass(frozen=True, slots=True)
class PreparedConversion:
    """A conversion of one local tensor whose collective has not begun.

    `x` is the operand of the step that communicates. It must not change until `finish`, and neither must `operands`.
    """

    split: SplitPlan
    x: Tensor
    operands: list[Tensor]
    results: list[Tensor]
    communicator: OutMover

    @property
    def kind(self) -> str:
        return self.split.transfer.kind

    def call(self) -> None:
        """Make the collective, which writes `results`."""
        self.split.transfer.call(self.operands, self.results, self.communicator)

    def finish(self) -> Tensor:
        """Return the new local tensor, once the collective is complete."""
        return _run(self.split.after, self.split.transfer.join(self.results, self.x), self.communicator)


def split_acts(acts: Sequence[Act], shape: Shape) -> SplitPlan | None:
    """Return the actions apart from their collective; None if there is none. `shape` is that of the result.

    Several collectives become one with everything between them, whose result is copied at the end.
    """
    places = [at for at, act in enumerate(acts) if act.transfer is not None]
    if not places:
        return None
    first, last = places[0], places[-1]
    transfer = acts[first].transfer
    if first == last and transfer is not None:
        return SplitPlan(tuple(acts[:first]), transfer, tuple(acts[first + 1 :]))
    return SplitPlan((), _as_one(tuple(acts), shape), ())


def _as_one(acts: Sequence[Act], shape: Shape) -> Transfer:
    return Transfer(
        "conversion",
        lambda x: [x],
        lambda x: [x.new_empty(shape)],
        lambda operands, results, c: results[0].copy_(_run(acts, operands[0], c)),
        lambda results, x: results[0],
    )


def _run(acts: Sequence[Act], x: Tensor, communicator: Mover) -> Tensor:
    for act in acts:
        x = act.run(x, communicator)
    return x
