"""Marks for whole modules: shard a layer's parameters, mark its inputs and outputs, run a function on local parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.comm import current
from meshwright.layout import Placement, ProcessMesh
from meshwright.tensor import DistTensor

from ._mesh import resolve_mesh
from ._tensors import dtensor_from_local, reshard, shard_tensor

ShardFn = Callable[[str, nn.Module, ProcessMesh], None]
PlacementList = Sequence[Placement]


def get_rank() -> int:
    """Number of this rank in the world."""
    return current().rank


def shard_layer(
    layer: nn.Module,
    process_mesh: ProcessMesh | None = None,
    shard_fn: ShardFn | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> nn.Module:
    """`layer` with its parameters and buffers on the mesh; returns the same module.

    `shard_fn(name, submodule, mesh)` marks the parameters of each submodule; what it leaves plain is replicated.
    `input_fn(inputs, mesh)` and `output_fn(outputs, mesh)` see what goes in and what comes out of `layer`.
    """
    mesh = resolve_mesh(process_mesh)
    for name, module in layer.named_modules():
        if shard_fn is not None:
            shard_fn(name, module, mesh)
        _replicate_rest(module, mesh)
    if input_fn is not None:
        layer.register_forward_pre_hook(lambda _, inputs: input_fn(inputs, mesh))
    if output_fn is not None:
        layer.register_forward_hook(lambda _, inputs, outputs: output_fn(outputs, mesh))
    return layer


def _replicate_rest(module: nn.Module, mesh: ProcessMesh) -> None:
    for table in (module._parameters, module._buffers):
        for name, value in table.items():
            if value is not None and not isinstance(value, DistTensor):
                table[name] = shard_tensor(value, mesh, [])  # pyright: ignore[reportArgumentType]


def local_map(
    func: Callable[..., Any],
    out_placements: Sequence[PlacementList | None],
    in_placements: Sequence[PlacementList | None] | None = None,
    process_mesh: ProcessMesh | None = None,
    reshard_inputs: bool = False,
) -> Callable[..., Any]:
    """`func` run on the local parts: distributed tensors in, plain tensors inside, distributed tensors out.

    Results lie as `out_placements` says (None: not a tensor, or left plain). Inputs must lie as `in_placements` says,
    or are brought there when `reshard_inputs`. A replicated input is used differently on each rank, so its gradient
    is added up over them.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mesh = process_mesh or next((a.mesh for a in args if isinstance(a, DistTensor)), None)
        mesh = resolve_mesh(mesh)
        wanted = in_placements if in_placements is not None else [None] * len(args)
        local = [_local_input(a, w, mesh, reshard_inputs) for a, w in zip(args, wanted, strict=True)]
        out = func(*local, **kwargs)
        many = isinstance(out, (list, tuple))
        results: list[Any] = list(out) if many else [out]
        made = [
            dtensor_from_local(o, mesh, p) if isinstance(o, Tensor) and p is not None else o
            for o, p in zip(results, out_placements, strict=True)
        ]
        return type(out)(made) if many else made[0]

    return wrapped


def _local_input(x: Any, wanted: PlacementList | None, mesh: ProcessMesh, may_move: bool) -> Any:
    if not isinstance(x, DistTensor):
        return x
    if wanted is not None and tuple(wanted) != x.placements[: len(wanted)]:
        if not may_move:
            raise ValueError(f"local_map wants {list(wanted)}, the input lies as {list(x.placements)}")
        x = reshard(x, mesh, wanted)
    return x.to_local()


class LocalLayer(nn.Module):
    """A module whose `forward` sees local parts: subclass it and write the forward pass of one rank."""

    def __init__(self, out_dist_attrs: Sequence[tuple[ProcessMesh, PlacementList]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.out_dist_attrs = list(out_dist_attrs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        local = [_local_input(a, None, a.mesh, False) if isinstance(a, DistTensor) else a for a in args]
        out = super().__call__(*local, **kwargs)
        many = isinstance(out, (list, tuple))
        results: list[Any] = list(out) if many else [out]
        made = [dtensor_from_local(o, m, p) for o, (m, p) in zip(results, self.out_dist_attrs, strict=True)]
        return type(out)(made) if many else made[0]
