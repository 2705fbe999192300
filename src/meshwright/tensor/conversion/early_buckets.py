"""Reductions of gradients that start during a backward pass, on devices with streams.

A gradient is complete when it has as many terms as its sum had in the step before. So gradients of accumulated passes
are complete in the last pass, and those of a parameter that is used twice after its second use. Complete gradients
fill buckets. A full bucket starts at once, and runs beside the rest of the pass.

A wrong number costs calls, but not correctness. If a gradient gets fewer terms, it is reduced when the program reads
gradients. If it gets more, the other terms are a second sum. All ranks run the same passes, so they make the same calls
in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from meshwright.layout import Spec

from . import gradient_buckets
from .gradient_buckets import PendingTerms, Reduction, start_reduction

_MOST_UNFINISHED = 2
"""Reductions that hold their terms at once. The start of a further one waits for the oldest."""


@dataclass(slots=True)
class CountedTerms(PendingTerms):
    """Terms of one parameter's gradient, and their number since the gradient was last read.

    The terms of a reduction that was started are not in `terms` any more. Later terms are a further sum.
    """

    count: int = 1

    def add(self, grad: Tensor, number: int) -> None:
        """Add the terms of a further use of the parameter."""
        is_first = self.terms is None
        self.number = number if is_first else hash((self.number, number))
        self.terms = grad.detach() if is_first else self.take() + grad
        self.count += 1

    @property
    def is_complete(self) -> bool:
        """True if the gradient now has as many terms as its sum had in the step before."""
        held: Any = self.leaf.__dict__
        return held.get("_terms_before", _NOTHING).get(self.spec) == self.count

    def keep_count(self) -> None:
        """Store the number of terms for the next step."""
        held: Any = self.leaf.__dict__
        held.setdefault("_terms_before", {})[self.spec] = self.count


_NOTHING: dict[Spec, int] = {}


@dataclass(slots=True)
class _Filling:
    """Complete gradients of a bucket that is not full, and their bytes."""

    items: list[CountedTerms] = field(default_factory=list[CountedTerms])
    nbytes: int = 0


class EarlyBuckets:
    """The buckets of one thread: those that are not full, and those whose reductions have started."""

    def __init__(self) -> None:
        self._filling: dict[Hashable, _Filling] = {}
        self._reductions: list[Reduction] = []

    def note_terms(self, item: CountedTerms) -> None:
        """Put a gradient that is now complete into a bucket, and start the bucket if it is full."""
        if item.is_complete:
            self._put(item)

    def _put(self, item: CountedTerms) -> None:
        """Put a gradient into a bucket, and start the bucket if it is full."""
        key = (item.spec.mesh, item.spec.dtype, item.spec.layout.partial)
        bucket = self._filling.setdefault(key, _Filling())
        bucket.items.append(item)
        bucket.nbytes += _largest_part(item.spec)
        if bucket.nbytes >= gradient_buckets.BUCKET_BYTES:
            del self._filling[key]
            self._start(bucket.items)

    def reduce(self, items: Sequence[PendingTerms]) -> list[PendingTerms]:
        """Add the gradients of counted items to those of their parameters, and return the other items."""
        counted = [item for item in items if isinstance(item, CountedTerms)]
        for item in counted:
            item.keep_count()
        self._leave_out(counted)
        self._start_all([item for item in counted if item.terms is not None])
        self._finish({id(item.leaf) for item in counted})
        return [item for item in items if not isinstance(item, CountedTerms)]

    def _finish(self, leaves: Set[int]) -> None:
        """Finish the reductions of parameters with these ids."""
        started, self._reductions = self._reductions, []
        for reduction in started:
            if leaves.isdisjoint(map(id, reduction.leaves)):
                self._reductions.append(reduction)
            else:
                reduction.finish()

    def forget(self, leaf: Tensor, items: Sequence[PendingTerms]) -> None:
        """Drop the gradient of `leaf`, whose terms are these items."""
        self._leave_out(items)
        for reduction in self._reductions:
            reduction.forget(leaf)
        self._reductions = [each for each in self._reductions if any(leaf is not None for leaf in each.leaves)]

    def _leave_out(self, items: Sequence[PendingTerms]) -> None:
        """Take items out of the buckets that are not full."""
        left = {id(item) for item in items}
        before, self._filling = self._filling, {}
        for key, bucket in before.items():
            kept = [item for item in bucket.items if id(item) not in left]
            if kept:
                self._filling[key] = _Filling(kept, sum(_largest_part(item.spec) for item in kept))

    def _start_all(self, items: Sequence[CountedTerms]) -> None:
        """Start the buckets of these items, also of those that are not full; other items stay where they are."""
        others, self._filling = self._filling, {}
        for item in items:
            self._put(item)
        for bucket in self._filling.values():
            self._start(bucket.items)
        self._filling = others

    def _start(self, bucket: Sequence[CountedTerms]) -> None:
        unfinished = [each for each in self._reductions if each.is_unfinished]
        if len(unfinished) >= _MOST_UNFINISHED:
            unfinished[0].wait()
        self._reductions.append(start_reduction(bucket))


def _largest_part(spec: Spec) -> int:
    """Return the bytes of the largest part of any rank, so that all ranks start their buckets at the same point."""
    return prod(spec.local_shape(spec.mesh.process_ids[0])) * spec.dtype.itemsize
