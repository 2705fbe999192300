"""Operands from several stages of a pipeline: they are sent to the stage that the program reached last.

A pipeline's stages are meshes without a rank in common. A value that one stage makes and another one reads, such as a
mask, a skip connection or an auxiliary loss, is sent automatically when an operation uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor

from meshwright.comm import world_ranks
from meshwright.layout import Layout, ProcessMesh, replicated

from .._errors import MixedMeshError
from .._torch_call import Arguments, NamedArguments
from ..core.dist_tensor import DistTensor, pipelines, rank_or_none
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import OperatorPacket
from .checkpointed_moves import note_arrival
from .distribute import as_dist_tensor, redistribute
from .local_parts import spec_of_whole
from .python_values import gather_everywhere

_SEVERAL_MESHES = ("__set__", "backward", "grad", "_make_dual", "_amp_", "_foreach_", "_fused_")
"""Prefixes of names of functions whose tensors may be on several meshes."""
_RENEWING = frozenset({"batch_norm", "native_batch_norm", "instance_norm"})
"""Functions that write to their second tensor without a name that shows it."""
_WITH_MAX_NORM = ("embedding", "embedding_bag")
"""Functions of a table as second argument, whose rows they scale in place if `max_norm`, the fourth one, is given."""
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
        pipelines.add(self)

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
        """Return the time at which the program last reached one of `meshes`, and that mesh.

        Of stages that it has not reached yet, the last one counts.
        """
        return max(((came, mesh) for mesh, came in reversed(self._came.items()) if mesh in meshes), key=_time_of)

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

    def sent(self, x: Tensor, mesh: ProcessMesh) -> Tensor:
        """Return `x` on the mesh of a stage, in its own layout; pending sums are reduced."""
        if not isinstance(x, DistTensor):
            return self.once(x, mesh, lambda: from_all_ranks(x, mesh))
        return self.once(x, mesh, lambda: redistribute(x, mesh, Layout(x._spec.layout.dims)))


def _time_of(found: tuple[int, ProcessMesh]) -> int:
    return found[0]


def stages_of(meshes: Collection[ProcessMesh]) -> StageOrder | None:
    """Return the pipeline of the calling rank with these stages; of several, the one that ran last."""
    rank = rank_or_none()
    found = [order for order in list[StageOrder](pipelines) if order.rank == rank and order.has(meshes)]
    return max(found, key=lambda order: order.latest(meshes)[0], default=None)


def on_latest_stage(name: str, args: Arguments, kwargs: NamedArguments) -> tuple[Arguments, NamedArguments] | None:
    """Return the arguments of a call on one mesh if they are on several stages of a pipeline; else None.

    A function that writes to an argument runs on the mesh of that argument. Plain tensors that need a gradient are
    brought to this mesh too, because every rank holds them, and needs their gradient.

    Raises:
        MixedMeshError: the function writes to arguments on several meshes.
    """
    tensors = list(tensors_in((args, kwargs)))
    meshes = dict.fromkeys(t._spec.mesh for t in tensors if isinstance(t, DistTensor))
    is_on_all_ranks = any(map(_needs_gradient_everywhere, tensors))
    if (len(meshes) < 2 and not is_on_all_ranks) or name.startswith(_SEVERAL_MESHES):
        return None
    order = stages_of(meshes)
    if order is None or (len(meshes) < 2 and is_world(next(iter(meshes)))):
        return None
    target = _mesh_of_written(name, args, kwargs) or order.latest(meshes)[1]

    def bring(x: Tensor) -> Tensor:
        is_elsewhere = x._spec.mesh is not target if isinstance(x, DistTensor) else _needs_gradient_everywhere(x)
        return order.sent(x, target) if is_elsewhere else x

    return map_tensors(bring, args), map_tensors(bring, kwargs)


def _needs_gradient_everywhere(x: Tensor) -> bool:
    """True for a plain tensor with a gradient: every rank of the world holds it, so every rank needs its gradient."""
    return not isinstance(x, DistTensor) and torch.is_grad_enabled() and x.requires_grad


def is_world(mesh: ProcessMesh) -> bool:
    """True if every rank of the world is in the mesh."""
    return mesh.size == len(world_ranks())


def from_all_ranks(x: Tensor, mesh: ProcessMesh) -> Tensor:
    """Return a plain tensor with a gradient on the mesh of a stage; every rank gets its gradient. Return others as is.

    Every rank of the world holds the plain tensor.
    """
    if is_world(mesh) or not _needs_gradient_everywhere(x):
        return x
    world = ProcessMesh(world_ranks(), ["world"])
    return redistribute(as_dist_tensor(x.view_as(x), spec_of_whole(x, world)), mesh, replicated(x.dim()))


def whole_for_plain_target(
    name: str, args: Arguments, kwargs: NamedArguments, targets: Sequence[str]
) -> tuple[Arguments, NamedArguments] | None:
    """Return whole values on every rank for a call that writes values of a pipeline stage to a plain tensor; else None.

    Every rank holds the plain tensor, also the ranks that are not in the stage.

    Raises:
        MixedMeshError: the function also writes to a tensor of a stage.
    """
    written = list(tensors_in([kwargs[key] for key in targets])) or written_tensors(name, args, kwargs)
    plain = [x for x in written if not isinstance(x, DistTensor)]
    meshes = {t._spec.mesh for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)} if plain else set()
    if not _are_stages(meshes):
        return None
    if len(plain) < len(written):
        if name.startswith("_foreach_"):
            return None  # each entry is a call of its own
        raise _several_meshes(name, [*map(repr, meshes), "a plain tensor"])
    return map_tensors(gather_everywhere, args), map_tensors(gather_everywhere, kwargs)


def _are_stages(meshes: Collection[ProcessMesh]) -> bool:
    """True if some of these meshes lack a rank of the world, and all of them are stages of a pipeline."""
    return not all(map(is_world, meshes)) and stages_of(meshes) is not None


def _mesh_of_written(name: str, args: Arguments, kwargs: NamedArguments) -> ProcessMesh | None:
    """Return the mesh of the arguments that a function writes to; None if it writes to none."""
    meshes = dict.fromkeys(x._spec.mesh for x in written_tensors(name, args, kwargs) if isinstance(x, DistTensor))
    if len(meshes) > 1:
        raise _several_meshes(name, list(map(repr, meshes)))
    return next(iter(meshes), None)


def _several_meshes(name: str, found: Sequence[str]) -> MixedMeshError:
    return MixedMeshError(
        f"{name}, which writes to tensors on several meshes",
        ", ".join(found),
        "an operation runs on one mesh, and its writes to a tensor elsewhere would be lost",
        "call mw.reshard(x, mesh, placements) to move one of them",
    )


def written_tensors(name: str, args: Arguments, kwargs: NamedArguments) -> list[Tensor]:
    """Return the tensors that a function of this name writes to, by its name, its options and its schema."""
    base = name.partition(".")[0]
    if base in _RENEWING:
        places = (1, "running_mean"), (2, "running_var")
    elif _is_in_place(base):
        places = ((0, "self"),)
    elif base in _WITH_MAX_NORM and (kwargs.get("max_norm") is not None or args[3:4] not in ((), (None,))):
        places = ((1, "weight"),)
    else:
        places = _written_places(base)
    return list(tensors_in([args[at] if at < len(args) else kwargs.get(key) for at, key in places]))


@lru_cache(4096)
def _written_places(name: str) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that an ATen function writes to by its schema, without `out`."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, OperatorPacket) else ()
    schemas = [getattr(packet, overload)._schema for overload in overloads]
    found = {
        (at, argument.name): None
        for schema in schemas
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
    }
    return tuple(found)


def _is_in_place(base: str) -> bool:
    """True if the name of a function says that it writes to its first argument."""
    in_place_operator = base.startswith("__i") and base not in ("__invert__", "__index__", "__int__")
    return base == "__setitem__" or in_place_operator or (base.endswith("_") and not base.endswith("__"))
