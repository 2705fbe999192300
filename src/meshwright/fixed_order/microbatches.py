"""Gradients over microbatches: one tree over the pieces of the whole batch.

A sum over the batch has up to eight pieces (`kernels`). A microbatch is a range of the batch. It holds its share of the
pieces, and its gradient is a subtree. `MicrobatchTree` adds the subtrees in the order of the whole tree.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.layout import TorchValue, axes_of
from meshwright.tensor import DistTensor, parts_recorded, tensors_in

from ._errors import SameNumbersError, refusal
from .kernels import MOST_PIECES, pieces_of


@dataclass(frozen=True, slots=True)
class _Part:
    """One of `count` microbatches, with `rows` rows."""

    count: int
    rows: int


_part: ContextVar[_Part | None] = ContextVar("microbatch", default=None)


@contextmanager
def one_of_microbatches(batches: Sequence[TorchValue]) -> Generator[None]:
    """Sum gradients inside the context as those of one of these microbatches.

    Raises:
        SameNumbersError: the microbatches are not 1, 2, 4 or 8 of one size, or their rows are sharded.
    """
    if any(_has_sharded_rows(x) for x in tensors_in(batches)):
        raise refusal(*_SHARDED)
    rows = {next((x.shape[0] for x in tensors_in(batch) if x.dim()), 1) for batch in batches}
    count = len(batches)
    if len(rows) != 1 or count > MOST_PIECES or count & (count - 1):
        raise SameNumbersError(
            f"a step of {count} microbatches inside same_numbers()",
            f"microbatches of {sorted(rows)} rows",
            "the pieces of the batch must be equal parts of all microbatches, and there are up to eight",
            "use 1, 2, 4 or 8 microbatches of one size",
        )
    token = _part.set(_Part(count, rows.pop()) if count > 1 else None)
    try:
        yield
    finally:
        _part.reset(token)


def pieces_along_batch(x: Tensor, size: int) -> int:
    """Return the number of pieces of a sum over the first dim of `x`, or over it and further dims: `size` elements.

    The dim is part of the batch if its length is a multiple of the rows of a microbatch.
    """
    part = _part.get()
    if part is None or x.shape[0] % part.rows:
        return pieces_of(size)
    if parts_recorded() and _has_sharded_rows(x):
        raise refusal(*_SHARDED)
    return pieces_of(size * part.count) // part.count


_SHARDED = "a step over microbatches whose rows are sharded", "a microbatch is no range of the batch then"


def _has_sharded_rows(x: Tensor) -> bool:
    return isinstance(x, DistTensor) and x.dim() > 0 and bool(axes_of(x.spec.layout.dims[0]))


class MicrobatchTree:
    """The sum of a term of each of `count` microbatches, as one tree; terms may come in any order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: dict[tuple[int, int], Tensor] = {}
        """Sums of complete subtrees, by the first microbatch and the number of microbatches."""

    def add(self, microbatch: int, term: Tensor) -> None:
        """Add the term of a microbatch."""
        first, width = microbatch, 1
        while (sibling := self._sums.pop((first ^ width, width), None)) is not None:
            term = sibling + term
            first, width = first & ~width, 2 * width
        self._sums[first, width] = term

    def total(self) -> Tensor | None:
        """Return the sum of the terms that were added; None if there are none."""
        return self._sum_of(0, 1 << (self._count - 1).bit_length())

    def _sum_of(self, first: int, width: int) -> Tensor | None:
        if (first, width) in self._sums or width == 1:
            return self._sums.get((first, width))
        half = width // 2
        low, high = self._sum_of(first, half), self._sum_of(first + half, half)
        if low is None or high is None:
            return high if low is None else low
        return low + high


class GradientTrees:
    """Trees of the gradients of parameters; each backward pass leaves the gradient of one microbatch in `.grad`."""

    def __init__(self, parameters: Iterable[nn.Parameter], count: int) -> None:
        self._trees = [(p, p.grad, MicrobatchTree(count)) for p in parameters]
        for p, _, _ in self._trees:
            p.grad = None

    def take(self, microbatch: int) -> None:
        """Move the gradients of a microbatch to the trees."""
        for p, _, tree in self._trees:
            if p.grad is not None:
                tree.add(microbatch, p.grad)
                p.grad = None

    def give(self) -> None:
        """Add the sums to the gradients from before."""
        for p, before, tree in self._trees:
            total = tree.total()
            p.grad = before if total is None else total if before is None else before + total
