"""Checks that local results have the shape, the memory format and the aliases that their specs require.

Torch may decide otherwise for a local part than for the whole tensor. For example, `contiguous` and `reshape` return
their argument itself if its strides allow that, and the strides of a part may allow it where the strides of the whole
tensor do not. The capture of a call found the decision for the whole tensor; the local result is changed to agree.

    shape          checked in the first calls of a plan; in every call if MESHWRIGHT_CHECK_RESULTS is set
    aliases        checked in every call, if the operator's schema lets its result alias an argument
    memory format  checked in the first calls; in every call after one result differed. A view is never copied
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Spec, TorchValue

from .._errors import LocalShapeError
from ..conversion.convert import arranged, is_arranged
from ..core.dist_tensor import DistTensor
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import FakeTensor, shares_storage

Apply = Callable[[TorchValue, Sequence[TorchValue]], TorchValue]
"""`apply(result, arguments)` returns the local results of a call, changed to agree with their specs."""

CHECKS_EVERY_CALL = os.environ.get("MESHWRIGHT_CHECK_RESULTS", "") not in ("", "0")
"""True if the shapes of results are checked in every call of a plan."""


class ResultRequirements:
    """The requirements on the local results of one plan; `apply` checks and enforces them.

    If the operator's schema lets result k alias an argument, `fresh[k]` is True for a new tensor and False for a view.
    """

    def __init__(self, name: str, outs: Sequence[Spec], fresh: Sequence[bool | None]) -> None:
        self.name, self.outs, self.fresh = name, outs, fresh
        self.settled = False
        self._seen_shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._arranges = False
        self.apply: Apply = self._checked

    @property
    def is_plain(self) -> bool:
        """True if no result has to be checked or changed any more."""
        return self.settled and self.apply is with_argument_views

    def _checked(self, out: TorchValue, inputs: Sequence[TorchValue]) -> TorchValue:
        out = self._enforced(out, inputs)
        results = list(tensors_in(out))
        rank = current_communicator().rank
        if results and len(results) == len(self.outs):
            for k, x in enumerate(results):
                self._check_shape(k, x, rank)
                if k < len(self.fresh) and self.fresh[k] is False:
                    self._check_view(k, x, inputs, rank)
            self._settle(rank)
        return out

    def _check_shape(self, k: int, x: Tensor, rank: int) -> None:
        spec = self.outs[k]
        if rank in spec.mesh and not isinstance(x, FakeTensor) and tuple(x.shape) != spec.local_shape(rank):
            raise LocalShapeError(
                f"{self.name} on rank {rank}",
                f"a local result of shape {tuple(x.shape)}",
                f"result {k} is {spec!r}, of which rank {rank} holds a part of shape {spec.local_shape(rank)}",
                "report this call: its rule is wrong. Until it is fixed, reshard the operands to mw.Replicate() first",
            )

    def _check_view(self, k: int, x: Tensor, inputs: Sequence[TorchValue], rank: int) -> None:
        if not x.numel() or isinstance(x, FakeTensor):
            return
        if not any(isinstance(t, Tensor) and shares_storage(t, x) for t in inputs):
            raise LocalShapeError(
                f"{self.name} on rank {rank}",
                "a local result with its own memory",
                f"result {k} is {self.outs[k]!r}, a view of an argument, and a write to the copy would be lost",
                "report this call: its rule is wrong. Until it is fixed, reshard the operands to mw.Replicate() first",
            )

    def _settle(self, rank: int) -> None:
        """Stop the checks once all shapes of this rank have been seen.

        Simulated ranks share the plan and count together.
        """
        if any(spec.is_symbolic for spec in self.outs):
            self.settled = True
            return
        ranks = self.outs[0].mesh.process_ids if current_communicator().kind == "simulated" else (rank,)
        self._seen_shapes.add(self._shapes(rank))
        self.settled = not CHECKS_EVERY_CALL and self._seen_shapes.issuperset(map(self._shapes, ranks))
        if self.settled:
            self.apply = self._settled()

    def _settled(self) -> Apply:
        if self._arranges:
            return self._enforced
        if self.fresh == (True,):
            return unshared
        return self._enforced if any(self.fresh) else with_argument_views

    def _shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return tuple(spec.local_shape(rank) for spec in self.outs)

    def _enforced(self, out: TorchValue, inputs: Sequence[TorchValue]) -> TorchValue:
        out = self._with_own_memory(out, inputs) if any(self.fresh) else with_argument_views(out, inputs)
        return self._in_memory_format(out)

    def _with_own_memory(self, out: TorchValue, inputs: Sequence[TorchValue]) -> TorchValue:
        left = iter(self.fresh)
        return with_argument_views(map_tensors(lambda x: unshared(x, inputs) if next(left, False) else x, out), inputs)

    def _in_memory_format(self, out: TorchValue) -> TorchValue:
        left, fresh = iter(self.outs), iter(self.fresh)

        def put(x: Tensor) -> Tensor:
            spec, is_view = next(left, None), next(fresh, None) is False
            if spec is None or is_view or not spec.is_dense or spec.is_symbolic or x.layout is not torch.strided:
                return x
            if isinstance(x, DistTensor) or x.dim() != spec.ndim or is_arranged(x, spec):
                return x
            self._arranges = True
            return arranged(x, spec)

        return map_tensors(put, out)


def unshared(out: Tensor, inputs: Sequence[TorchValue]) -> Tensor:
    """Return `out`, one tensor, as a copy if it shares memory with an argument."""
    for x in inputs:
        if isinstance(x, Tensor) and (x is out or shares_storage(x, out)):
            return out.clone()
    return out


def with_argument_views(out: TorchValue, inputs: Sequence[TorchValue]) -> TorchValue:
    """Return `out` with views in place of plain arguments, so that stamping a result leaves the argument plain."""
    if type(out) is Tensor:
        for x in inputs:
            if x is out:
                return out.view_as(out)
        return out
    known = {id(t) for t in inputs if isinstance(t, Tensor) and not isinstance(t, DistTensor)}
    return map_tensors(lambda t: t.view_as(t) if id(t) in known else t, out) if known else out
