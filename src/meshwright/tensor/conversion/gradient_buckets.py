"""Buckets: terms of several gradients that one all-reduce adds up, at once or while other work runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Layout, Spec

from ..core.computation_numbers import collectives_of_call
from ..torch_hooks import modes_active, no_interception, no_modes
from .convert import convert_local, move

BUCKET_BYTES = 25 * 2**20
_CALL = "the gradients of parameters"


@dataclass(slots=True)
class PendingTerms:
    """Terms of one parameter's gradient: the parameter, the terms' spec, and their local sum so far.

    `number` identifies the backward passes that made them (`computation_numbers`).
    """

    leaf: Tensor
    spec: Spec
    terms: Tensor | None
    number: int

    def take(self) -> Tensor:
        """Return the terms and drop the reference to them."""
        terms, self.terms = self.terms, None
        assert terms is not None
        return terms


class Reduction:
    """A reduction in flight: the parameters, None for one whose gradient was replaced, and a function that waits."""

    def __init__(self, leaves: Sequence[Tensor], sums: Callable[[], Sequence[Tensor]]) -> None:
        self.leaves: list[Tensor | None] = [*leaves]
        self._pending: Callable[[], Sequence[Tensor]] | None = sums
        self._sums: Sequence[Tensor] = ()

    @property
    def is_unfinished(self) -> bool:
        """True if nobody has waited for the sums, so that the terms are still in memory."""
        return self._pending is not None

    def wait(self) -> Sequence[Tensor]:
        """Wait for the sums, so that the memory of the terms is free, and return them."""
        if self._pending is not None:
            self._sums, self._pending = self._pending(), None
        return self._sums

    def finish(self) -> None:
        """Wait for the gradients, and add them to those of the parameters."""
        with no_interception(), torch.no_grad():
            for leaf, grad in zip(self.leaves, self.wait(), strict=True):
                if leaf is not None:
                    leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)

    def forget(self, leaf: Tensor) -> None:
        """Leave out the gradient of `leaf`, which is replaced."""
        self.leaves = [None if each is leaf else each for each in self.leaves]


def _buckets(waiting: Sequence[PendingTerms]) -> Iterator[list[PendingTerms]]:
    """Yield items with the same mesh, dtype and pending axes, in order, up to BUCKET_BYTES together."""
    groups: dict[Hashable, list[PendingTerms]] = {}
    filled: dict[Hashable, int] = {}
    for item in waiting:
        key = (item.spec.mesh, item.spec.dtype, item.spec.layout.partial)
        groups.setdefault(key, []).append(item)
        filled[key] = filled.get(key, 0) + (0 if item.terms is None else item.terms.nbytes)
        if filled[key] >= BUCKET_BYTES:
            del filled[key]
            yield groups.pop(key)
    yield from groups.values()


def add_up(waiting: Sequence[PendingTerms]) -> None:
    """Reduce the terms in buckets, and add the sums to the gradients; the terms are released."""
    with no_interception(), torch.no_grad():
        for bucket in _buckets(waiting):
            leaves, numbers = [item.leaf for item in bucket], [item.number for item in bucket]
            with collectives_of_call(_CALL, leaves, numbers):
                sums = _reduced(bucket)
            for item, grad in zip(bucket, sums, strict=True):
                item.leaf.grad = grad if item.leaf.grad is None else item.leaf.grad.add_(grad)


def start_reduction(bucket: Sequence[PendingTerms]) -> Reduction:
    """Start to reduce the terms of a bucket by one all-reduce."""
    leaves, numbers = [item.leaf for item in bucket], [item.number for item in bucket]
    with hidden_conversion(), collectives_of_call(_CALL, leaves, numbers):
        return Reduction(leaves, _started(bucket))


def bucket_of(frame: FrameType | None) -> Spec | None:
    """Return the spec of the first gradient in the bucket that the frame reduces; None if it reduces none."""
    while frame is not None and frame.f_code not in _CODES:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["first"]


@contextmanager
def hidden_conversion() -> Generator[None]:
    """Context of a conversion: no gradients, no interception, no dispatch modes, no inference tensors."""
    is_inference = torch.is_inference_mode_enabled()
    with (
        no_interception(),
        torch.inference_mode(False) if is_inference else nullcontext(),
        torch.no_grad(),
        no_modes() if modes_active() else nullcontext(),
    ):
        yield


def _reduced(bucket: Sequence[PendingTerms]) -> list[Tensor]:
    """Return the sums of a bucket's terms, by one all-reduce; the terms are released."""
    first = bucket[0].spec
    found = [item.take() for item in bucket]
    if current_communicator().rank not in first.mesh:
        return found
    shapes, flat, terms, sums = _joined(found, first)
    whole = convert_local(flat, terms, sums)
    return [part.view(shape) for part, shape in zip(whole.split([s.numel() for s in shapes]), shapes, strict=True)]


def _started(bucket: Sequence[PendingTerms]) -> Callable[[], list[Tensor]]:
    """Start the all-reduce of a bucket's terms; return a function that waits for the sums."""
    first, here = bucket[0].spec, current_communicator()
    found = [item.take() for item in bucket]
    if here.rank not in first.mesh:
        return lambda: found
    shapes, flat, terms, sums = _joined(found, first)
    flat = flat.resolve_conj().resolve_neg()
    pending = here.start(move(terms, sums).plan, flat)

    def finish() -> list[Tensor]:
        parts = pending.wait().split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return finish


_CODES = {_reduced.__code__, _started.__code__}


def _joined(found: list[Tensor], first: Spec) -> tuple[list[torch.Size], Tensor, Spec, Spec]:
    """Return the shapes of terms, all of them in one dim, its spec, and that of the sums.

    The list is empty afterwards.
    """
    shapes = [each.shape for each in found]
    flat = torch.cat([each.reshape(-1) for each in found]) if len(found) > 1 else found[0].reshape(-1)
    found.clear()
    axes = tuple((axis, "sum") for axis in first.layout.partial_axes)
    terms = Spec(first.mesh, Layout(((),), axes), flat.shape, flat.dtype)
    return shapes, flat, terms, terms.with_layout(Layout(((),)))
