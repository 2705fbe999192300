"""Functions of lists of tensors, `torch._foreach_*`: one local call, or one call for each entry.

For each of these operators, torch has a kernel that loops over the entries and calls operators of one tensor. The loop
shows which operator each entry gets, so this module needs no names of operators. If every operator in the loop runs on
local tensors as they are, one local call of the list function does the work. Otherwise the loop runs, and each of its
operators is called on distributed tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.layout import ProcessMesh, Spec, TorchValue

from .._torch_call import TorchFunction
from ..capture.call_capture import Captured, taken_apart
from ..conversion.local_parts import whole_local
from ..conversion.python_values import gather_everywhere
from ..core.absent_tensor import Absent
from ..core.dist_tensor import DistTensor
from ..core.tree import map_tensors, tensors_in
from ..planning.call_plan import is_written, unchanged
from ..planning.decision_record import recording
from ..planning.result_checks import ResultRequirements
from ..torch_hooks import Operator, interception, list_kernel, modes_before_dispatch, operators_recorded
from .captured_call import capture_call, input_specs
from .run_plan import CallPlan, OperatorSequence, plan_direct

PREFIX = "_foreach_"


def is_of_lists(func: TorchFunction) -> bool:
    """True for `torch._foreach_*` and its operators."""
    return str(getattr(func, "__name__", "")).startswith(PREFIX)


def plan_lists(
    func: TorchFunction, args: TorchValue, kwargs: TorchValue, tensors: Sequence[Tensor]
) -> tuple[CallPlan, Captured | None]:
    """Return the plan of a function of lists, and the captured operators that it depends on, or None."""
    captured = None if recording() else _entry_operators(func, args, kwargs)
    if captured is None:
        return EntryByEntry(), None
    outs = _unchanged_specs(captured, tensors)
    if outs is not None:
        requirements = ResultRequirements(str(func.__name__), outs, (None,) * len(outs))
        return plan_direct(outs, captured.out, args, kwargs, requirements), captured
    return (OperatorSequence(captured), captured) if modes_before_dispatch() else (EntryByEntry(), None)


class EntryByEntry(CallPlan):
    """A call of torch's loop over the entries; each operator in it is a call of its own on distributed tensors.

    The loop sees meta tensors of global shape, because some loops ask whether an entry is empty. A tensor outside the
    lists, such as the `scalars` of `_foreach_addcmul_`, is passed as it is, because the loop reads its numbers. If some
    entry is on another mesh, such as that of another pipeline stage, every rank gets these numbers.
    """

    __slots__ = ()

    def run(self, func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
        lists = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, (list, tuple))]
        loop = _Loop({t._spec.mesh for t in tensors_in(lists) if isinstance(t, DistTensor)})
        args = [loop.argument(a) for a in args]
        kwargs = {k: loop.argument(v) for k, v in (kwargs or {}).items()}
        with operators_recorded(lambda *_: None, loop.run):
            return map_tensors(loop.real, func(*args, **kwargs))


class _Loop:
    """The tensors of one call, keyed by the meta tensors that the loop sees in their places."""

    def __init__(self, meshes: set[ProcessMesh]) -> None:
        self.meshes = meshes
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def argument(self, value: TorchValue) -> TorchValue:
        if isinstance(value, (list, tuple)):
            return [self.stand_in(v) if isinstance(v, Tensor) else v for v in value]
        if not isinstance(value, DistTensor):
            return value
        if self.meshes - {value._spec.mesh}:
            return gather_everywhere(value)
        return value if value._away else whole_local(value)

    def stand_in(self, x: Tensor) -> Tensor:
        meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        self.known[id(meta)] = (meta, x)
        return meta

    def real(self, x: Tensor) -> Tensor:
        return self.known[id(x)][1] if id(x) in self.known else x

    def run(self, op: Operator, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue]) -> TorchValue:
        kernel = list_kernel(op)
        if kernel is not None:
            with operators_recorded(lambda *_: None, self.run):
                return kernel(*args, **kwargs)
        args, kwargs = map_tensors(self.real, (args, kwargs))
        with interception():
            out = op(*args, **kwargs)
        shown = {id(x): meta for meta, x in self.known.values()}
        return map_tensors(lambda x: shown[id(x)] if id(x) in shown else self.stand_in(x), out)


def _entry_operators(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> Captured | None:
    """Return the operators of the loop, each of one tensor; None if the loop cannot be captured."""
    try:
        captured = capture_call(func, args, kwargs).captured
    except Exception:  # the loop raises the same error when it runs
        return None
    apart = taken_apart(captured) if len(captured.nodes) == 1 else None
    if apart is None or not is_written(captured.nodes[0].op):
        return apart
    return replace(apart, out=captured.out)  # the kernel of an in-place operator returns nothing


def _unchanged_specs(captured: Captured, tensors: Sequence[Tensor]) -> tuple[Spec, ...] | None:
    """Return the specs of the results if one local call is right, else None."""
    distributed = [t for t in tensors if isinstance(t, DistTensor)]
    mesh = distributed[0]._spec.mesh
    if any(isinstance(t, Absent) or t._viewing or t._spec.mesh is not mesh for t in distributed):
        return None
    return unchanged(captured, input_specs(captured, tensors), mesh)
