"""Several parameters that one call gathers, and whose gradients one call reduces.

The gathered tensors are results of one autograd function, so autograd calls its backward once all their gradients are
there. A tensor without a gradient is left out of the reduction, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm import PendingConversion, call_purpose, current_communicator
from meshwright.layout import Spec, TorchValue

from ..core.absent_tensor import Absent
from ..core.call_sites import is_backward, keep_call_site
from ..core.capture_marks import in_capture
from ..core.computation_numbers import collectives_of_call, collectives_of_gradient, keep_number, pass_number
from ..core.dist_tensor import DistTensor, as_part, is_leaf, wants_grad
from ..core.write_counts import Mark, mark_of
from ..torch_hooks import bare_apply, forward_mode, jit_tracing, no_interception, transforming
from .convert import dense_gradient, move, on_same_memory
from .gradient_buckets import hidden_conversion
from .joint_plan import JointPlan, joint_plan
from .pending_gradients import add_later, finish_in_flight, may_come_later

_CALL = "gather parameters"


class JointGather:
    """Parameters with one dtype, mesh and gathered axes: their whole tensors, as long as those are in memory."""

    def __init__(self, parts: Sequence[DistTensor], wholes: Sequence[Spec]) -> None:
        self.parts, self.wholes = tuple(parts), tuple(wholes)
        self._specs = tuple(part._spec for part in parts)
        self._plan = joint_plan(self._specs, self.wholes, current_communicator().rank)
        self._started: tuple[Tensor, PendingConversion] | None = None
        self._memory: list[Tensor] | None = None
        self._marks: list[Mark] = []

    def is_possible(self) -> bool:
        """True if the parameters still have the layouts that they had first."""
        return all(part._spec is spec for part, spec in zip(self.parts, self._specs, strict=True))

    def start(self) -> None:
        """Begin to gather, unless the whole tensors are there or on their way."""
        if self._memory is None and self._started is None:
            with hidden_conversion(), collectives_of_call(_CALL, self.parts):
                buffer = self._packed()
                self._started = buffer, current_communicator().start(self._plan.gather, buffer)

    def memory(self) -> list[Tensor]:
        """Return this rank's part of each whole tensor, gathered now if it is not there."""
        if self._memory is None:
            with hidden_conversion(), collectives_of_call(_CALL, self.parts):
                self._memory = self._plan.unpack(self._buffers())
        return self._memory

    def gathered(self) -> list[DistTensor]:
        """Return the whole tensors for one run of their modules.

        In every mode of autograd they are as parameters are: differentiable, and no tensors of inference mode.
        """
        memory = self.memory()
        numbered = collectives_of_call(_CALL, self.parts)
        with no_interception(), numbered, torch.inference_mode(False), torch.enable_grad():
            is_graded = any(map(wants_grad, self.parts))
            local = _gather(self, *self.parts) if is_graded else map(on_same_memory, memory)
            found = [as_part(x, spec) for x, spec in zip(local, self.wholes, strict=True)]
        for part, whole in zip(self.parts, found, strict=True):
            pass_number(part, whole)
        return found

    def free(self) -> None:
        """Drop the references to the whole tensors; a gather that was begun is waited for."""
        if self._started is not None:
            self._started[1].wait()
        self._started = self._memory = None

    def free_if_written(self) -> None:
        """Drop the whole tensors if a parameter was written to since it was gathered, or has other memory."""
        is_there = self._memory is not None or self._started is not None
        if is_there and self._marks != list(map(mark_of, self.parts)):
            self.free()

    def _packed(self) -> Tensor:
        self._marks = list(map(mark_of, self.parts))
        return self._plan.pack(self.parts)

    def _buffers(self) -> Tensor:
        """Return the buffers of all ranks, from the gather that was begun or from one that runs now."""
        if self._started is None:
            return current_communicator().convert(self._plan.gather, self._packed())
        _, pending = self._started
        out = pending.wait()
        self._started = None
        return out

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return this rank's parts of the gradients, given its terms of the gradients of the whole tensors.

        If nobody needs the gradients during the backward pass, they are added to `.grad` later, and None is returned.
        """
        self.free()
        present = [at for at, grad in enumerate(grads) if grad is not None]
        terms = _Terms(
            [self.parts[at] for at in present],
            [self._specs[at] for at in present],
            [self.wholes[at] for at in present],
            [dense_gradient(grad) for grad in grads if grad is not None],
        )
        out: list[Tensor | None] = [None] * len(grads)
        with collectives_of_call("the gradients of parameters", terms.leaves, [call_purpose.what[0]]):
            for at, part in zip(present, terms.reduce(), strict=True):
                out[at] = part
        return out


@dataclass(slots=True)
class _Terms:
    """This rank's terms of gradients, with the parameters and the specs of the parts and of the whole tensors."""

    leaves: list[DistTensor]
    parts: list[Spec]
    wholes: list[Spec]
    terms: list[Tensor]

    def reduce(self) -> Sequence[Tensor | None]:
        """Return the parts of the sums; None if they are added to `.grad` later."""
        if not self.terms:
            return ()
        if torch.is_grad_enabled() or any(x.dtype is not s.dtype for x, s in zip(self.terms, self.parts, strict=True)):
            ways = [move(part, whole).transpose for part, whole in zip(self.parts, self.wholes, strict=True)]
            return [way(x) for way, x in zip(ways, self.terms, strict=True)]
        here = current_communicator()
        packing = joint_plan(tuple(self.parts), tuple(self.wholes), here.rank)
        with hidden_conversion():
            if not may_come_later(self.leaves):
                return packing.unpack_sums(here.convert(packing.reduce, packing.pack_terms(self.terms)))
            finish_in_flight()
            buffer = packing.pack_terms(self.terms)
            add_later(self.leaves, _Sums(packing, buffer, here.start(packing.reduce, buffer)))
            return [None] * len(self.leaves)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The result of a reduction in flight, and the buffer that it reads."""

    packing: JointPlan
    buffer: Tensor
    pending: PendingConversion

    def __call__(self) -> Sequence[Tensor]:
        return self.packing.unpack_sums(self.pending.wait())


def can_gather_jointly(parts: Sequence[Tensor]) -> bool:
    """True if these are leaves that are distributed, and no capture, transform or trace sees their gather."""
    if in_capture() or transforming() or jit_tracing() or forward_mode():
        return False
    with no_interception():
        return all(type(part) in (DistTensor, Absent) and is_leaf(part) for part in parts)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: TorchValue, gather: JointGather, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.gather = gather
        keep_call_site(ctx)
        keep_number(ctx)
        ctx.set_materialize_grads(False)
        out = tuple(map(on_same_memory, gather.memory()))
        ctx.mark_non_differentiable(*[x for x, part in zip(out, parts, strict=True) if not wants_grad(part)])
        return out

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with no_interception(), collectives_of_gradient(ctx):
            return None, *ctx.gather.reduce(grads)


is_backward(_Gather.backward)
_gather: Callable[..., tuple[Tensor, ...]] = bare_apply(_Gather)


def trained_leaf(x: TorchValue) -> TorchValue:
    """Return the parameter of which `x` is the whole tensor; any other value unchanged.

    A parameter is gathered once for the forward pass and again for code that runs in a backward pass, such as an
    adjoint method. Only the parameter itself has the gradients of both.
    """
    if not isinstance(x, DistTensor):
        return x
    with no_interception():
        node, at = x.grad_fn, x.output_nr
    gather: object = getattr(node, "gather", None)
    return gather.parts[at] if isinstance(gather, JointGather) else x
