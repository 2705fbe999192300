"""Make a model parallel from outside: a plan for its modules by name, its batch, stages and ZeRO."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.layout import MeshError, Placement, ProcessMesh, Replicate, Shard, TorchValue
from meshwright.tensor import Context, DistTensor, map_tensors, tensors_in

from .._errors import StrategyError
from ..marks.context_parallel import ContextHooks, check_context
from ..marks.default_mesh import resolve_mesh
from ..marks.layers import shard_layer
from ..marks.tensors import shard_tensor
from .optimizer import replace_parameters, shard_optimizer
from .same_inputs import SameInputs
from .split_pipeline import split_pipeline
from .styles import Style
from .unit_choice import UnitNames
from .zero import ShardingStage1, ShardingStage2, ShardingStage3

_WILD = re.compile(r"[*?\[]")
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer | None)


@dataclass(frozen=True)
class Parallelism:
    """The configuration of `parallelize`.

    Axes that the mesh does not have are ignored, those of styles too. `parallelize` refuses axes of styles that seem to
    be misspelled.

    `plan` maps patterns of module paths ("layers.*.q_proj") to styles. Inputs are sharded along dim 0 over the axes
    `batch`, and along dim 1 over the axes `sequence`. `split` names the modules at which the stages of the axis `pp`
    begin; without it, layers are divided evenly. If stages have several chunks, `way` has the stage of each chunk, and
    `split` names the modules at which chunks begin. `zero` is the stage of ZeRO (0: none), over the axes `zero_axes`,
    by default those of the batch. `master_weights` and `offload` are as in `shard_optimizer`. `context` is the
    algorithm for attention along a sharded sequence while the model runs: "gather", "ring" or "ulysses"
    (`context_parallel`). `units` are those of `ShardingStage3`.

    Raises:
        StrategyError: `zero` or `context` is none of these, or an option has no effect at this stage of ZeRO.
    """

    plan: Mapping[str, Style] = field(default_factory=dict[str, Style])
    batch: tuple[str, ...] = ("dp",)
    sequence: tuple[str, ...] = ("cp",)
    split: tuple[str, ...] | None = None
    pp: str = "pp"
    zero: int = 0
    zero_axes: tuple[str, ...] | None = None
    master_weights: bool = False
    offload: bool = False
    context: Context = "gather"
    way: tuple[int, ...] | None = None
    units: UnitNames | None = None

    def __post_init__(self) -> None:
        check_context(self.context)
        if self.zero not in (0, 1, 2, 3):
            raise StrategyError(
                f"zero = {self.zero}",
                "no such stage",
                "ZeRO has the stages 1, 2 and 3; 0 switches it off",
                "write zero=3",
            )
        self._refuse_option_without_effect("units", self.units is not None and self.zero != 3, "zero=3")
        self._refuse_option_without_effect("zero_axes", self.zero_axes is not None and not self.zero, "zero=1, 2 or 3")

    def _refuse_option_without_effect(self, name: str, has_none: bool, needed: str) -> None:
        if has_none:
            raise StrategyError(
                f"Parallelism({name}={getattr(self, name)!r}, zero={self.zero})",
                f"an option that only {needed} reads",
                "the run would shard the parameters in another way than the option says",
                f"pass {needed}, or leave {name} out",
            )


def parallelize(
    model: nn.Module,
    optimizer: AnyOptimizer = None,
    mesh: ProcessMesh | None = None,
    config: Parallelism | None = None,
) -> tuple[nn.Module, AnyOptimizer]:
    """Make `model` and `optimizer` parallel on `mesh` as `config` says; returns the same objects.

    The model's code needs no change. The optimizer continues with the distributed parameters and keeps its states.

    Raises:
        StrategyError: a pattern matches no module.
        MeshError: no style has an axis of the mesh, but one has an axis with nearly the same name.

    >>> import torch, meshwright as mw
    >>> def go():
    ...     net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    ...     optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ...     mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    ...     plan = {"0": mw.ColwiseParallel(), "2": mw.RowwiseParallel()}
    ...     net, optimizer = mw.parallelize(net, optimizer, mesh, mw.Parallelism(plan))
    ...     return net[0].weight.placements, net(torch.ones(6, 4)).placements
    >>> mw.simulate(go, 4)[0]
    ((Replicate(), Shard(0)), (Shard(0), Partial()))
    """
    config = config or Parallelism()
    styles = _styles(model, config.plan)
    mesh = resolve_mesh(mesh)
    _check_axes(config, mesh)
    before = dict(model.named_parameters(remove_duplicate=False))
    stages = mesh.sizes.get(config.pp, 1)

    def mark(_: str, layer: nn.Module, home: ProcessMesh) -> None:
        for style in styles.get(layer, ()):
            style.mark(layer, home)

    if stages > 1:
        home = mesh[config.pp, 0]
        split_pipeline(
            model,
            mesh,
            config.split,
            axis=config.pp,
            way=config.way,
            batch=_input_placements(home, config),
            shard_fn=mark,
        )
    else:
        shard_layer(model, mesh, mark)
        model.register_forward_pre_hook(_InputDistribution(mesh, config), with_kwargs=True)
    if config.context != "gather":
        ContextHooks(config.context).put_on(model)
    if optimizer is not None:
        replace_parameters(optimizer, before, dict(model.named_parameters(remove_duplicate=False)))
        _shard(model, optimizer, mesh, config)
    return model, optimizer


def _styles(model: nn.Module, plan: Mapping[str, Style]) -> Mapping[nn.Module, Sequence[Style]]:
    """Return the styles of each module: those of all patterns that its path matches, in their order.

    Raises:
        StrategyError: a pattern matches no module.
    """
    found: dict[nn.Module, list[Style]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = sorted(modules)
    for pattern, style in plan.items():
        matching = [modules[path] for path in _matching(paths, pattern)]
        if not matching:
            near = get_close_matches(pattern, modules, n=3, cutoff=0.3)
            raise StrategyError(
                f"a plan for {pattern!r}",
                f"no module of {type(model).__name__} with such a path",
                "a pattern must match the path of a module; * and ? are wildcards",
                f"write {' or '.join(map(repr, near)) or 'a path of model.named_modules()'}",
            )
        for module in dict.fromkeys(matching):
            found.setdefault(module, []).append(style)
    return found


def _check_axes(config: Parallelism, mesh: ProcessMesh) -> None:
    """Raise MeshError for a style whose axis seems to be misspelled: an unused axis of the mesh has a similar name."""
    named: set[str] = {axis for style in config.plan.values() if (axis := getattr(style, "axis", None)) is not None}
    used = {*named, *config.batch, *config.sequence, *(config.zero_axes or ()), config.pp}
    free = [axis for axis in mesh.dim_names if axis not in used]
    for axis in sorted(named - set(mesh.dim_names)):
        near = get_close_matches(axis, free, n=1, cutoff=0.7)
        if near:
            raise MeshError(
                f"a layer sharded along {axis!r}",
                repr(mesh),
                f"the mesh has no axis {axis!r}, and the configuration names no axis {near[0]!r}",
                f"write axis={near[0]!r} in the style",
            )


def _matching(paths: Sequence[str], pattern: str) -> Iterator[str]:
    """Yield the sorted paths that the pattern matches; only paths with the pattern's fixed prefix are tested."""
    start = _WILD.split(pattern, maxsplit=1)[0]
    for at in range(bisect_left(paths, start), len(paths)):
        if not paths[at].startswith(start):
            return
        if fnmatchcase(paths[at], pattern):
            yield paths[at]
        if start == pattern:
            return


def _input_placements(mesh: ProcessMesh, config: Parallelism) -> list[Placement]:
    """Return the placements of a tensor with rows along dim 0 and positions along dim 1."""
    dims = dict.fromkeys(config.sequence, 1) | dict.fromkeys(config.batch, 0)
    return [Shard(dims[a]) if a in dims else Replicate() for a in mesh.dim_names]


@dataclass(frozen=True, slots=True)
class _InputDistribution:
    """A hook that distributes plain inputs: those with as many rows as the first tensor, and likewise along dim 1."""

    mesh: ProcessMesh
    config: Parallelism
    same: SameInputs = field(default_factory=SameInputs)

    def __call__(self, _: nn.Module, args: TorchValue, kwargs: TorchValue) -> TorchValue:
        self.same.check(list(tensors_in((args, kwargs))))
        sizes = next((x.shape[:2] for x in tensors_in((args, kwargs)) if x.dim()), ())

        def lay(x: Tensor) -> Tensor:
            if isinstance(x, DistTensor):
                return x
            alike = [d for d, n in enumerate(sizes) if d < x.dim() and x.shape[d] == n]
            placements = _input_placements(self.mesh, self.config)
            kept = [p if isinstance(p, Shard) and p.dim in alike else Replicate() for p in placements]
            # a leaf would become a leaf of its own, and the caller's tensor would get no gradient
            return shard_tensor(x.view_as(x) if x.requires_grad else x, self.mesh, kept)

        return map_tensors(lay, args), map_tensors(lay, kwargs)


def _shard(model: nn.Module, optimizer: Optimizer, mesh: ProcessMesh, config: Parallelism) -> None:
    axes = tuple(a for a in config.zero_axes or config.batch if a in mesh.sizes)
    stage = None
    if config.zero and axes:
        kind = {1: lambda: ShardingStage1(axes), 2: lambda: ShardingStage2(axes, model)}
        stage = kind.get(config.zero, lambda: ShardingStage3(axes, model, units=config.units))()
    shard_optimizer(optimizer, stage, master_weights=config.master_weights, offload=config.offload)
