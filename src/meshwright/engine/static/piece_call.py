"""Run a piece: its two programs as one differentiable function of the rank's parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from meshwright.graph import ModelPiece, Program, Run
from meshwright.layout import TorchValue, autocast_modes
from meshwright.tensor import as_part, leaves_in, local_parts, map_leaves

from .._errors import StaticError
from ..recording.memory_overlap import check_no_overlap
from ..recording.program_inputs import Fetch


@dataclass(slots=True)
class OutputTree:
    """The structure of an output: a tree with numbers in place of its leaves, and the leaves that are no tensors."""

    tree: TorchValue = None
    plain: dict[int, Any] = field(default_factory=dict[int, Any])

    def taken_apart(self, out: TorchValue) -> list[Tensor]:
        """Return the tensors of `out`, and store the structure of `out`."""
        leaves, number = list(leaves_in(out)), count()
        self.tree = map_leaves(lambda _: next(number), out)
        self.plain = {at: x for at, x in enumerate(leaves) if not isinstance(x, Tensor)}
        return [x for x in leaves if isinstance(x, Tensor)]

    def put_together(self, tensors: Iterable[Any]) -> TorchValue:
        """Return the tree with these tensors as its leaves."""
        left = iter(tensors)
        return map_leaves(lambda at: self.plain[at] if at in self.plain else next(left), self.tree)


@dataclass(slots=True)
class CompiledPiece:
    """A piece, the functions that run it, and the functions that fetch the inputs of its forward pass."""

    name: str
    piece: ModelPiece
    forward: Run
    backward: Run | None
    fetch: tuple[Fetch, ...]
    asks: tuple[int, ...]
    """The numbers of the forward pass's inputs that get gradients."""
    form: OutputTree
    may_overlap: bool = True
    """True until a check has shown that inputs which the piece writes share no memory with other inputs."""


@contextmanager
def autocast_off() -> Generator[None]:
    """Switch autocast off inside: a program has its own casts."""
    with ExitStack() as stack:
        for device, _ in autocast_modes():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def run_piece(found: CompiledPiece, leaves: Sequence[Any]) -> TorchValue:
    """Return the outputs of the module, as part of the caller's autograd graph."""
    with local_parts(), autocast_off():
        given = [fetch(leaves) for fetch in found.fetch]
        if found.may_overlap:
            forward = found.piece.forward
            written = {x for x, _ in forward.writes}
            check_no_overlap(forward.inputs, given, [at for at, i in enumerate(forward.inputs) if i.value in written])
            found.may_overlap = False
        flat = _Piece.apply(found, *given)
        specs = [None if s is None else s.of_part(x.shape) for x, s in zip(flat, found.piece.specs, strict=True)]
    return found.form.put_together([x if s is None else as_part(x, s) for x, s in zip(flat, specs, strict=True)])


class _Piece(torch.autograd.Function):
    """The two programs of a piece, as one differentiable function of the rank's parts."""

    @staticmethod
    def forward(ctx: TorchValue, found: CompiledPiece, *given: TorchValue) -> tuple[Any, ...]:
        outputs, written = found.forward(*given)
        targets = _targets(found.piece.forward, given)
        flat, saved = (_without_memory_of(targets, outputs[key]) for key in ("out", "saved"))
        for x, value in zip(targets, written, strict=True):
            x.copy_(value)
        ctx.found, ctx.count = found, len(given)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in saved])
        flat = _writable_values(_distinct_values(flat, given), given)
        wanted = found.piece.wanted
        ctx.mark_non_differentiable(*[x for n, x in enumerate(flat) if isinstance(x, Tensor) and n not in wanted])
        return tuple(flat)

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Any, ...]:
        found: CompiledPiece = ctx.found
        if torch.is_grad_enabled():
            raise StaticError(
                f"create_graph=True through {found.name}",
                "a piece whose backward pass is a recorded program",
                "the backward pass was recorded once, and autograd cannot differentiate it",
                "use the model itself instead of mw.to_static(model) for gradients of gradients",
            )
        back: list[Any] = [None] * (ctx.count + 1)
        if found.backward is None:
            return tuple(back)
        saved = [n if x is None else x for x, n in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        with local_parts(), autocast_off(), torch.no_grad():
            out, _ = found.backward(*saved, *[grads[n].contiguous() for n in found.piece.wanted])
        for at, grad in zip(found.asks, out, strict=True):
            back[at + 1] = grad
        return tuple(back)


def _targets(forward: Program, given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that the program writes to, in the order of its writes."""
    at = {i.value: x for i, x in zip(forward.inputs, given, strict=True)}
    return [at[x] for x, _ in forward.writes]


def _without_memory_of(targets: Sequence[Tensor], values: Sequence[Any]) -> list[Any]:
    """Return the values; those in the memory of a target are copied, so that writes do not change them."""
    taken = {x.untyped_storage().data_ptr() for x in targets}

    def apart(x: TorchValue) -> TorchValue:
        return x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in taken else x

    return [apart(x) for x in values] if taken else list(values)


def _distinct_values(values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Return the values, with a view for each argument or repeated value: autograd needs distinct tensors."""
    seen = {id(x) for x in given}
    found: list[Any] = []
    for x in values:
        found.append(x.view_as(x) if isinstance(x, Tensor) and id(x) in seen else x)
        seen.add(id(x))
    return found


def _writable_values(values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Return the values; views that share memory with no argument and no other value become tensors of their own.

    Autograd refuses to write to an output of a function that is a view. The new tensors share the versions of the old
    ones, so that autograd sees writes to what the backward pass has saved.
    """
    if not any(isinstance(x, Tensor) and x._base is not None for x in values):
        return list(values)
    owners = Counter(x.untyped_storage().data_ptr() for x in (*values, *given) if isinstance(x, Tensor))

    def owned(x: TorchValue) -> TorchValue:
        is_only_owner = isinstance(x, Tensor) and owners[x.untyped_storage().data_ptr()] == 1
        return x.detach() if is_only_owner else x

    return [owned(x) for x in values]
