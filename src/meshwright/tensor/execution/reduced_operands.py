"""Calls of linear operators on pending sums that another call has reduced before.

`h * torch.rsqrt(h.pow(2).mean(-1) + eps)` reduces the pending sum `h` for its square. The product is linear in `h`, so
it would be a pending sum again, with a reduction of its own. Therefore it takes the reduced value: a sum that was
reduced once stays reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction
from ..capture.call_capture import Captured
from ..conversion.local_parts import may_be_reduced, reduced_before
from ..core.dist_tensor import DistTensor
from ..planning.call_plan import OperatorPlan, Step, is_written, makes_views
from ..torch_hooks import no_interception
from .run_plan import CallPlan


@dataclass(frozen=True, slots=True)
class ReducedOperands(CallPlan):
    """A call whose operands at `places` are pending sums; their reduced values are taken if all were reduced before."""

    plan: CallPlan
    places: tuple[int, ...]

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        reduced = reduced_arguments(self.places, args)
        if reduced is None:
            return self.plan.run(func, types, args, kwargs)
        return func(*reduced, **(kwargs or {}))

    @property
    def settled(self) -> CallPlan:
        return replace(self, plan=self.plan.settled)


def pending_places(found: OperatorPlan | None, captured: Captured, args: TorchValue) -> tuple[int, ...]:
    """Return the places of the operands that are pending sums, as the result is; empty if the call needs them so.

    A call that writes, or returns a view, needs its operand itself.
    """
    if not isinstance(found, Step) or not any(spec.layout.partial for spec in found.outs):
        return ()
    if is_written(found.node.op) or found.node.op.namespace != "aten" or makes_views(captured):
        return ()
    pending = [s for s in found.ins if s is not None and s.layout.partial]
    places = tuple(at for at, x in enumerate(args) if isinstance(x, Tensor) and _is_pending(x))
    return places if len(places) == len(pending) else ()


def _is_pending(x: Tensor) -> bool:
    return isinstance(x, DistTensor) and bool(x._spec.layout.partial)


def reduced_arguments(places: Sequence[int], args: TorchValue) -> list[TorchValue] | None:
    """Return the arguments with reduced values at `places`; None unless all of them were reduced before."""
    for at in places:
        if not may_be_reduced(args[at]):
            return None
    new = [*args]
    with no_interception():
        for at in places:
            reduced = reduced_before(new[at])
            if reduced is None:
                return None
            new[at] = reduced
    return new
