"""Ways to run a model in parallel, put on a module that knows nothing of them: marks by one rule for all models.

Along "tp" the weights of two dims and more are cut in turn along their first and their second dim, in the order of the
modules; tables of embeddings along their first. That is Megatron's cut where layers come in pairs, and an unwise one
elsewhere: unwise marks have to give the same numbers.
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
"""Tensors of fewer elements are not cut by ZeRO."""


@dataclass(frozen=True)
class Setting:
    """A mesh, what its axes cut, and what else either mode is told.

    `rows` cut the batch, `positions` its inputs along their second dim, `weights` the parameters by the rule, `first`
    each parameter along its first dim, `experts` those of three dims along theirs, `sequence` what comes into a block,
    along its second dim. Layers go to `stages`. Where a static program is told by `options`, eager mode is told the
    same by `zero`, a stage of ZeRO, or by marks.
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
        """One placement per axis: cut along the dim that is named for it."""
        return [mw.Shard(cuts[a]) if a in cuts else mw.Replicate() for a in self.axes]

    def enter(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The batch laid over the mesh; stages take theirs themselves."""
        if self.stages:
            return tuple(batch)
        rows = dict.fromkeys(self.rows, 0)
        cuts = [rows | (dict.fromkeys(self.positions, 1) if is_sequence(x) else {}) for x in batch]
        return tuple(mw.shard_tensor(x, self.mesh, self.places(c)) for x, c in zip(batch, cuts, strict=True))

    def unfit(self, model: nn.Module, batch: Sequence[Tensor]) -> str:
        """Why the setting is not for such a model, if it is not."""
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
    """An input of rows and positions."""
    return x.dim() == 2


def is_experts(owner: nn.Module, p: Tensor) -> bool:
    """A weight of several experts: a matrix for each, in a module that is none of torch's."""
    return p.dim() == 3 and min(p.shape) > 1 and not type(owner).__module__.startswith("torch.")


def mark(model: nn.Module, setting: Setting, mode: str) -> nn.Module:
    """Lays parameters and buffers over the mesh; in eager mode also what static programs are told by options."""
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
    """What comes into the members of a list of layers is cut along its second dim."""
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
    """The stage of ZeRO that eager mode is told."""
    stages = {
        1: mw.ShardingStage1("dp", SMALL),
        2: mw.ShardingStage2("dp", model, SMALL),
        3: mw.ShardingStage3("dp", model, SMALL),
    }
    if setting.zero:
        mw.shard_optimizer(optimizer, stages[setting.zero])


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
