"""Calls of distributed tensors with the operators that they consist of, and the plans of these operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.layout import ProcessMesh, Spec, TorchValue

from .._torch_call import TorchFunction
from ..capture.call_capture import Captured, capture
from ..core.dist_tensor import DistTensor
from ..core.tree import tensors_in
from ..planning.call_plan import OneByOne, OperatorPlan, RandomWhole, Step, Unchanged, plan_call


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call and its operators. Nothing that outlives the call may refer to it, since it holds the arguments.

    Attributes:
        tensors: The tensors among the arguments, in order.
    """

    func: TorchFunction
    args: TorchValue
    kwargs: TorchValue
    tensors: tuple[Tensor, ...]
    captured: Captured

    @property
    def specs(self) -> dict[int, Spec]:
        """The id of a captured argument → the spec of its distributed tensor."""
        return input_specs(self.captured, self.tensors)


def capture_call(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> CapturedCall:
    """Return the call with its operators; raises the error of torch, of whatever kind, if it cannot be captured."""
    captured = capture(func, args, kwargs, lambda t: t._spec if isinstance(t, DistTensor) else None)
    return CapturedCall(func, args, kwargs, tuple(tensors_in((args, kwargs))), captured)


def input_specs(captured: Captured, tensors: Sequence[Tensor]) -> dict[int, Spec]:
    """Return the id of each captured argument that stands for a distributed one of `tensors` → its spec."""
    pairs = zip(captured.inputs, tensors, strict=True)
    return {id(meta): t._spec for meta, t in pairs if isinstance(t, DistTensor)}


def plan_captured(
    captured: Captured, specs: Mapping[int, Spec], mesh: ProcessMesh
) -> tuple[Captured, OperatorPlan | None]:
    """Return the plan of a captured call, and the operators that it is for.

    These are other operators than the captured ones if torch's decomposition of a single operator runs instead of it.
    """
    found = plan_call(captured, specs, mesh)
    return (found.captured if isinstance(found, OneByOne) else captured), found


def result_specs(plan: OperatorPlan | None) -> tuple[Spec, ...]:
    """Return the specs of the results; empty if the plan does not determine them."""
    return plan.outs if isinstance(plan, (Step, RandomWhole, Unchanged)) else ()
