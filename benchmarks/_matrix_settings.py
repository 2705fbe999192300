"""Kinds of parallelism for models that contain no parallel code: one rule shards the weights of all models.

Along "tp" the weights with two or more dims are sharded alternately along their first and their second dim, in the
order of the modules. Embedding tables are sharded along their first dim. That is Megatron's sharding if layers come in
pairs, and a poor one otherwise. Poor shardings have to give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

STATIC, EAGER = "static", "eager"
MODES = (EAGER, STATIC)
SMALL = 16
"""ZeRO does not shard tensors of fewer elements."""


@dataclass(frozen=True)
class Setting:
    """A mesh, the dims that its axes shard, and the options of both modes.

    `rows` shard the batch, `positions` its inputs along their second dim, `weights` the parameters by the rule, `first`
    each parameter along its first dim, `experts` the 3-dim ones along their first dim, `sequence` the inputs of a block
    along their second dim. Layers go to `stages`. Static programs get `options`; eager mode does the same by `zero`, a
    stage of ZeRO, or by marks.
    """

    axes: Mapping[str, int]
    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    stages: str = ""
    zero: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    chosen: bool = False

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())

    @property
    def mesh(self) -> mw.ProcessMesh:
        ids = torch.arange(self.ranks).reshape(tuple(self.axes.values()))
        return mw.ProcessMesh(ids.tolist(), list(self.axes))

    def places(self, cuts: Mapping[str, int]) -> list[mw.Placement]:
        """Return one placement per axis: sharded along the dim that `cuts` has for the axis, else replicated."""
        return [mw.Shard(cuts[a]) if a in cuts else mw.Replicate() for a in self.axes]

    def enter(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the batch, sharded over the mesh; pipeline stages take a plain batch."""
        if self.stages:
            return tuple(batch)
        rows = dict.fromkeys(self.rows, 0)
        cuts = [rows | (dict.fromkeys(self.positions, 1) if is_sequence(x) else {}) for x in batch]
        return tuple(mw.shard_tensor(x, self.mesh, self.places(c)) for x, c in zip(batch, cuts, strict=True))

    def unfit(self, model: nn.Module, batch: Sequence[Tensor]) -> str:
        """Return the reason why the setting does not apply to the model, or ""."""
        if self.positions and not any(map(is_sequence, batch)):
            return "the batch has no sequence"
        if self.stages and not any(len(part) > 1 for part in model.modules() if isinstance(part, nn.ModuleList)):
            return "the model is no chain of layers"
        if self.experts and not any(is_experts(m, p) for m in model.modules() for p in m.parameters(recurse=False)):
            return "the model has no experts"
        return ""


def zero(stage: int) -> Setting:
    options = {"sharding": {"enable": True, "stage": stage, "least": SMALL}}
    return Setting({"dp": 4}, rows=("dp",), zero=stage, options=options)


SETTINGS: dict[str, Setting] = {
    "dp": Setting({"dp": 4}, rows=("dp",)),
    "tp": Setting({"tp": 4}, weights=("tp",)),
    "dp×tp": Setting({"dp": 2, "tp": 2}, rows=("dp",), weights=("tp",)),
    "ZeRO-1": zero(1),
    "ZeRO-2": zero(2),
    "ZeRO-3": zero(3),
    "sp": Setting(
        {"dp": 2, "tp": 2}, rows=("dp",), weights=("tp",), sequence=("tp",),
        options={"sp_optimization": {"enable": True}},
    ),
    "cp": Setting({"dp": 2, "cp": 2}, rows=("dp",), positions=("cp",)),
    "pp": Setting({"dp": 2, "pp": 2}, rows=("dp",), stages="pp"),
    "ep": Setting({"dp": 2, "ep": 2}, rows=("dp", "ep"), experts=("ep",)),
    "3-D": Setting({"dp": 2, "zero": 2, "tp": 2}, rows=("dp", "zero"), weights=("tp",), first=("zero",)),
    "auto": Setting({"dp": 4}, chosen=True),
}  # fmt: skip
"""Name in the table → setting; ZeRO and sequence parallelism are options of static programs."""


def is_sequence(x: Tensor) -> bool:
    """True for an input of rows and positions."""
    return x.dim() == 2


def is_experts(owner: nn.Module, p: Tensor) -> bool:
    """True for a weight with one matrix per expert, in a module that is not torch's."""
    return p.dim() == 3 and min(p.shape) > 1 and not type(owner).__module__.startswith("torch.")


def mark(model: nn.Module, setting: Setting, mode: str) -> nn.Module:
    """Shard parameters and buffers over the mesh; in eager mode also apply the marks that replace static options."""
    if setting.stages:
        return mw.parallelize(model, None, setting.mesh, mw.Parallelism(batch=setting.rows, pp=setting.stages))[0]
    turn = cycle((0, 1))

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        del name
        held = list(layer.named_parameters(recurse=False))
        dim = None
        if any(p.dim() > 1 for _, p in held):
            dim = 0 if isinstance(layer, nn.Embedding) else next(turn)
        for key, p in held:
            cuts = dict.fromkeys(setting.first, 0) if p.dim() else {}
            if dim is not None and dim < p.dim():
                cuts |= dict.fromkeys(setting.weights, dim)
            cuts |= dict.fromkeys(setting.experts, 0) if is_experts(layer, p) else {}
            setattr(layer, key, mw.shard_tensor(p, mesh, setting.places(cuts)))

    mw.shard_layer(model, setting.mesh, cut)
    if setting.sequence and mode == EAGER:
        _cut_sequences(model, setting)
    return model


def _cut_sequences(model: nn.Module, setting: Setting) -> None:
    """Shard the inputs of all members of layer lists along their second dim."""
    cuts = dict.fromkeys(setting.rows, 0) | dict.fromkeys(setting.sequence, 1)
    places = setting.places(cuts)

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del layer
        args = tuple(mw.reshard(x, setting.mesh, places) if _is_hidden(x) else x for x in args)
        return args, {k: mw.reshard(x, setting.mesh, places) if _is_hidden(x) else x for k, x in kwargs.items()}

    for part in model.modules():
        for layer in filter(None, part) if isinstance(part, nn.ModuleList) else ():
            layer.register_forward_pre_hook(enter, with_kwargs=True)


def _is_hidden(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()


def shard_states(optimizer: torch.optim.Optimizer, model: nn.Module, setting: Setting) -> None:
    """Apply the setting's stage of ZeRO in eager mode."""
    stages = {
        1: mw.ShardingStage1("dp", SMALL),
        2: mw.ShardingStage2("dp", model, SMALL),
        3: mw.ShardingStage3("dp", model, SMALL),
    }
    if setting.zero:
        mw.shard_optimizer(optimizer, stages[setting.zero])


def follow(model: nn.Module, plan: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """Shard the model as a plan says, for eager mode; return a function that shards a batch."""
    specs = {name: (spec.mesh, spec.placements) for name, spec in plan.items()}
    mesh = next(iter(specs.values()))[0]

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        for key, p in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            found = specs.get(f"{name}.{key}".strip(".").replace(".", "_"))
            if found is not None:
                setattr(layer, key, mw.shard_tensor(p, mesh, list(found[1])))

    mw.shard_layer(model, mesh, cut)
    return lambda batch: tuple(mw.shard_tensor(x, mesh, list(specs[f"batch_{n}"][1])) for n, x in enumerate(batch))
