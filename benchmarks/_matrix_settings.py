"""Ways to run a model in parallel, put on a module that knows nothing of them: marks by one rule for all models.

Along "tp" the weights of two dims and more are cut in turn along their first and their second dim, in the order of the
modules; tables of embeddings along their first. That is Megatron's cut where layers come in pairs, and an unwise one
elsewhere: unwise marks have to give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

STATIC, EAGER = "static", "eager"
MODES = (EAGER, STATIC)
SMALL = 16
"""Tensors of fewer elements are not cut by ZeRO in static programs."""


@dataclass(frozen=True)
class Setting:
    """A mesh, what its axes cut, and what else either mode is told.

    `rows` cut the batch, `weights` the parameters by the rule, `first` each parameter along its first dim, `states` the
    optimizer's states along theirs, `sequence` what comes into a block, along its second dim. Where a
    static program is told by `options`, the marks that say the same to eager mode are left out.
    """

    axes: Mapping[str, int]
    rows: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chosen: bool = False
    only: Mapping[str, str] = field(default_factory=dict[str, str])
    """Mode → why the setting is not for it."""

    @property
    def ranks(self) -> int:
        size = 1
        for n in self.axes.values():
            size *= n
        return size

    @property
    def mesh(self) -> mw.ProcessMesh:
        ids = torch.arange(self.ranks).reshape(tuple(self.axes.values()))
        return mw.ProcessMesh(ids.tolist(), list(self.axes))

    def places(self, cuts: Mapping[str, int]) -> list[mw.Placement]:
        """One placement per axis: cut along the dim that is named for it."""
        return [mw.Shard(cuts[a]) if a in cuts else mw.Replicate() for a in self.axes]

    def enter(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The batch laid over the mesh."""
        cuts = dict.fromkeys(self.rows, 0)
        return tuple(mw.shard_tensor(x, self.mesh, self.places(cuts)) for x in batch)


def zero(stage: int, **marks: Any) -> Setting:
    options = {"sharding": {"enable": True, "stage": stage, "least": SMALL}}
    return Setting({"dp": 4}, rows=("dp",), options=options, **marks)


SETTINGS: dict[str, Setting] = {
    "dp": Setting({"dp": 4}, rows=("dp",)),
    "tp": Setting({"tp": 4}, weights=("tp",)),
    "dp×tp": Setting({"dp": 2, "tp": 2}, rows=("dp",), weights=("tp",)),
    "ZeRO-1": zero(1, states=("dp",)),
    "ZeRO-2": zero(2, only={EAGER: "eager gradients lie as their parameters do"}),
    "ZeRO-3": zero(3, first=("dp",)),
    "sp": Setting(
        {"dp": 2, "tp": 2}, rows=("dp",), weights=("tp",), sequence=("tp",),
        options={"sp_optimization": {"enable": True}},
    ),
    "3-D": Setting({"dp": 2, "zero": 2, "tp": 2}, rows=("dp", "zero"), weights=("tp",), first=("zero",)),
    "auto": Setting({"dp": 4}, chosen=True),
}  # fmt: skip
"""Name in the table → setting; ZeRO and sequence parallelism are options of static programs, marks in eager mode."""


def mark(model: nn.Module, setting: Setting, mode: str) -> nn.Module:
    """Lays parameters and buffers over the mesh; in eager mode also what static programs are told by options."""
    first = () if mode == STATIC and setting.options else setting.first
    turn = iter(_turns())

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        del name
        held = list(layer.named_parameters(recurse=False))
        dim = None
        if any(p.dim() > 1 for _, p in held):
            dim = 0 if isinstance(layer, nn.Embedding) else next(turn)
        for key, p in held:
            cuts = dict.fromkeys(first, 0) if p.dim() else {}
            if dim is not None and dim < p.dim():
                cuts |= dict.fromkeys(setting.weights, dim)
            setattr(layer, key, mw.shard_tensor(p, mesh, setting.places(cuts)))

    mw.shard_layer(model, setting.mesh, cut)
    if setting.sequence and mode == EAGER:
        _cut_sequences(model, setting)
    return model


def _turns() -> Any:
    while True:
        yield from (0, 1)


def _cut_sequences(model: nn.Module, setting: Setting) -> None:
    """What comes into the members of a list of layers is cut along its second dim."""
    cuts = dict.fromkeys(setting.rows, 0) | dict.fromkeys(setting.sequence, 1)
    places = setting.places(cuts)

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del layer
        args = tuple(mw.reshard(x, setting.mesh, places) if _is_sequence(x) else x for x in args)
        return args, {k: mw.reshard(x, setting.mesh, places) if _is_sequence(x) else x for k, x in kwargs.items()}

    for part in model.modules():
        for layer in part if isinstance(part, nn.ModuleList) else ():
            layer.register_forward_pre_hook(enter, with_kwargs=True)


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()


def lay_states(optimizer: torch.optim.Optimizer, setting: Setting) -> None:
    """In eager mode the states of the optimizer are cut along `states`."""
    cuts = dict.fromkeys(setting.states, 0)

    def along(key: str, parameter: mw.DistTensor, state: mw.DistTensor) -> list[mw.Placement] | None:
        del key, parameter
        return setting.places(cuts) if state.dim() else None

    if cuts:
        mw.shard_optimizer(optimizer, along)


def follow(model: nn.Module, plan: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """Lays the model as a plan says, for eager mode; gives what lays a batch."""
    specs = {name: (spec.mesh, spec.placements) for name, spec in plan.items()}
    mesh = next(iter(specs.values()))[0]

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        for key, p in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            found = specs.get(f"{name}.{key}".strip(".").replace(".", "_"))
            if found is not None:
                setattr(layer, key, mw.shard_tensor(p, mesh, list(found[1])))

    mw.shard_layer(model, mesh, cut)
    return lambda batch: tuple(mw.shard_tensor(x, mesh, list(specs[f"batch_{n}"][1])) for n, x in enumerate(batch))
