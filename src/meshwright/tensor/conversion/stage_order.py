"""Operands from several stages of a pipeline: they are sent to the stage that the program reached last.

A pipeline's stages are meshes without a rank in common. A value that one stage makes and another one reads, such as a
mask, a skip connection or an auxiliary loss, is sent automatically when an operation uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from itertools import count
from weakref import WeakSet

import torch
from torch import Tensor

from meshwright.layout import Layout, ProcessMesh

from .._torch_call import Arguments, NamedArguments
from ..core.dist_tensor import DistTensor, rank_or_none
from ..core.tree import map_tensors, tensors_in
from .checkpointed_moves import note_arrival
from .distribute import redistribute

_SEVERAL_MESHES = ("__set__", "backward", "grad", "_make_dual", "_amp_", "_foreach_", "_fused_")
"""Prefixes of names of functions whose tensors may be on several meshes."""
_RENEWING = frozenset({"batch_norm", "native_batch_norm", "instance_norm"})
"""Functions that write to their second tensor without a name that shows it."""
_clock = count(1)


ReturnHandler = Callable[[DistTensor, ProcessMesh], None]
"""A function that is called with a tensor and the mesh of the earlier stage that it goes to."""

returns_to: ContextVar[ReturnHandler | None] = ContextVar("returns_to", default=None)
"""The function that is called if a value with a gradient goes back to an earlier stage; it may raise an error."""


class StageOrder:
    """The meshes of a pipeline's stages, and the time at which the calling rank's program last reached each of them.

    `stages_of` finds it on the rank that made it, as long as it is referenced.
    """

    def __init__(self, meshes: Iterable[ProcessMesh]) -> None:
        self.rank = rank_or_none()
        self._came = dict.fromkeys(meshes, 0)
        self._sent: dict[tuple[int, int, ProcessMesh, bool], tuple[Tensor, Tensor]] = {}
        self._depth = 0
        _known.add(self)

    def has(self, meshes: Collection[ProcessMesh]) -> bool:
        """True if all of these are meshes of stages."""
        return all(mesh in self._came for mesh in meshes)

    def come_to(self, mesh: ProcessMesh) -> None:
        """Record that the program continues in the stage on `mesh`."""
        self._came[mesh] = next(_clock)

    def _goes_back(self, x: DistTensor, mesh: ProcessMesh) -> bool:
        """True if `x` needs a gradient, and is on the mesh of a later stage than `mesh`."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return False
        order = list(self._came)
        return x._spec.mesh in order and order.index(mesh) < order.index(x._spec.mesh)

    def latest(self, meshes: Collection[ProcessMesh]) -> tuple[int, ProcessMesh]:
        """Return the time at which the program last reached one of `meshes`, and that mesh."""
        return max(((self._came[mesh], mesh) for mesh in meshes), key=lambda found: found[0])

    def begin(self) -> None:
        """Begin a scope in which each value is sent to a stage only once, for all operations and layers there."""
        self._depth += 1

    def end(self) -> None:
        """End the scope of the last `begin`; values that were sent are released."""
        self._depth -= 1
        if self._depth == 0:
            self._sent.clear()

    def once(self, x: Tensor, mesh: ProcessMesh, send: Callable[[], Tensor]) -> Tensor:
        """Return `send()`, which is `x` on `mesh`; the result is cached between `begin` and `end`."""
        handler = returns_to.get()
        if handler is not None and isinstance(x, DistTensor) and self._goes_back(x, mesh):
            handler(x, mesh)
        if self._depth == 0:
            return send()
        version = 0 if x.is_inference() else x._version
        key = (id(x), version, mesh, torch.is_grad_enabled())
        if key not in self._sent:
            self._sent[key] = (x, send())
        elif isinstance(x, DistTensor) and x._spec.mesh is not mesh:
            note_arrival(self._sent[key][1])
        return self._sent[key][1]

    def sent(self, x: DistTensor, mesh: ProcessMesh) -> Tensor:
        """Return `x` on the mesh of a stage, in its own layout; pending sums are reduced."""
        return self.once(x, mesh, lambda: redistribute(x, mesh, Layout(x._spec.layout.dims)))


_known: WeakSet[StageOrder] = WeakSet()


def stages_of(meshes: Collection[ProcessMesh]) -> StageOrder | None:
    """Return the pipeline of the calling rank with these stages; of several, the one that ran last."""
    rank = rank_or_none()
    found = [order for order in list(_known) if order.rank == rank and order.has(meshes)]
    return max(found, key=lambda order: order.latest(meshes)[0], default=None)


def on_latest_stage(name: str, args: Arguments, kwargs: NamedArguments) -> tuple[Arguments, NamedArguments] | None:
    """Return the arguments of a call on one mesh if they are on several stages of a pipeline; else None.

    A function that writes to an argument runs on the mesh of that argument.
    """
    tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)]
    meshes = dict.fromkeys(t._spec.mesh for t in tensors)
    if len(meshes) < 2 or name.startswith(_SEVERAL_MESHES):
        return None
    order = stages_of(meshes)
    if order is None:
        return None
    written = written_by(name, tensors)
    target = order.latest(meshes)[1] if written is None else written._spec.mesh

    def bring(x: Tensor) -> Tensor:
        return order.sent(x, target) if isinstance(x, DistTensor) and x._spec.mesh is not target else x

    return map_tensors(bring, args), map_tensors(bring, kwargs)


def written_by(name: str, tensors: Sequence[DistTensor]) -> DistTensor | None:
    """Return the tensor that a function of this name writes to; None if it writes to none."""
    base = name.partition(".")[0]
    if base in _RENEWING:
        return tensors[1]
    in_place_operator = base.startswith("__i") and base not in ("__invert__", "__index__", "__int__")
    writes = base == "__setitem__" or in_place_operator or (base.endswith("_") and not base.endswith("__"))
    return tensors[0] if writes else None
