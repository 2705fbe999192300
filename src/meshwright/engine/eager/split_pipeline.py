"""Split a model into the chunks of a pipeline without changing its code: at named modules, or evenly by cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain
from math import inf
from typing import Any

from torch import Tensor, nn

from meshwright.layout import Placement, ProcessMesh
from meshwright.pipeline import StageError
from meshwright.tensor import DistTensor, StageOrder

from ..marks.layers import ShardFn, shard_layer
from ..marks.module_memory import keep_shared_memory
from ..marks.tensors import shard_tensor
from .example_run import Costs, ExampleRun, costs_of
from .stage_entry import StageEntry
from .swapped_parameters import swap_parameters

_LISTS_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)


def split_pipeline(
    model: nn.Module,
    mesh: ProcessMesh,
    at: Sequence[str] | None = None,
    *,
    axis: str = "pp",
    way: Sequence[int] | None = None,
    batch: Sequence[Placement] = (),
    shard_fn: ShardFn | None = None,
    example: Sequence[Any] | None = None,
) -> nn.Module:
    """Put the layers of `model` on the stages of `mesh` along `axis`; returns the same module.

    A chunk begins at each module that `at` names; at a list, it begins with the first layer. Without names, the layers
    of the longest list are divided so that the most expensive chunk costs least. With an `example` batch, whose forward
    pass is captured and not run, modules are in the order of their calls, and cost their operations. Without it, they
    are in the order of registration, and cost their parameters. `way` has the stage of each chunk; the default is one
    chunk per stage.

    Inputs of a layer are moved to its stage. Plain tensors get the placements `batch` there; distributed ones keep
    their placements. `shard_fn` marks parameters as in `shard_layer`, including those that modules around layers hold.
    A parameter that layers share is on the stage of the first of them, and is sent to the others. A parameter that a
    module around layers holds is on the stage of its first layer, a scalar on that of its last. With an example, it is
    on the stage of the first layer that reads it, and a buffer that changes on that of the last layer that it depends
    on.

    Raises:
        StageError: a name or the number of chunks does not fit.

    >>> import meshwright as mw
    >>> net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    >>> mesh = mw.ProcessMesh([0, 1], ["pp"])
    >>> mw.simulate(lambda: [p.mesh.process_ids for p in mw.split_pipeline(net, mesh).parameters()][::2], 2)[0]
    [(0,), (0,), (1,), (1,)]
    """
    stages = mesh.get_dim_size(axis)
    way = tuple(range(stages)) if way is None else tuple(way)
    run = None if example is None else ExampleRun.of(model, example)
    layers, starts = _layers_and_starts(model, run, at, len(way))
    _check(starts, layers, way, stages)
    order = StageOrder(mesh[axis, stage] for stage in range(stages))
    shared, homes = _SharedParameters(), dict[str, ProcessMesh]()
    with keep_shared_memory(model, f"split_pipeline of {type(model).__name__}"):
        for name, chunk in zip(layers, accumulate(int(name in starts) for name in layers), strict=True):
            begins = name in starts
            home = homes[name] = mesh[axis, way[chunk]]
            same = begins and chunk > 0 and way[chunk] == way[chunk - 1]
            part = model.get_submodule(name)
            with shared.kept(part):
                shard_layer(part, home, shard_fn)
            _enter_stage(part, StageEntry(order, home, batch, same), begins)
        places = {name: homes[layer] for name, layer in (run.places(layers) if run else {}).items()}
        _distribute_between_layers(model, homes, places, shared, shard_fn)
    _keep_order(model, order)
    return model


def _layers_and_starts(
    model: nn.Module, run: ExampleRun | None, at: Sequence[str] | None, chunks: int
) -> tuple[list[str], list[str]]:
    """Return the layers in their order, and those at which chunks begin, as asked or for even costs."""
    layers = _layers(model, at or ())
    layers = layers if run is None else run.ordered(layers)
    if at is not None:
        return layers, [_first_inside(name, layers) for name in at]
    return layers, even_starts(layers, costs_of(model) if run is None else run.costs(), chunks)


def _enter_stage(part: nn.Module, entry: StageEntry, begins: bool) -> None:
    """Put the entry on a layer, if it has tensors or a chunk begins there; of a list of layers, on each of them."""
    for at, called in enumerate(_called_parts(part)):
        if begins or _holds(called):
            (entry if at == 0 else replace(entry, same=False)).put_on(called)


def _distribute_between_layers(
    model: nn.Module,
    homes: Mapping[str, ProcessMesh],
    places: Mapping[str, ProcessMesh],
    shared: _SharedParameters,
    shard_fn: ShardFn | None,
) -> None:
    """Distribute the tensors that modules around layers hold themselves, such as embeddings and scalars.

    A tensor goes to the stage that `places` has for its name. Without an entry, scalars, which scale the output, go to
    the stage of the module's last layer, and all others to that of its first layer, with the marks of `shard_fn`. A
    tensor that a layer holds too stays one tensor.
    """
    inside = _stages_inside(homes)
    for path, module in model.named_modules():
        around = path.rpartition(".")[0] if isinstance(module, _LISTS_OF_PARAMETERS) else path
        if around not in inside:
            continue
        first, last = inside[around][0], inside[around][-1]
        plain = _plain_tensors(module)
        if plain and shard_fn is not None:
            shard_fn(path, module, first)
        for table, name, x in plain:
            home = places.get(f"{path}.{name}" if path else name, last if x.dim() == 0 else first)
            table[name] = shared.laid(x, table[name], home)


def _plain_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the module's own tensors that are not distributed, each with its table and name."""
    tables: list[dict[str, Any]] = [module._parameters, module._buffers]
    return [(table, name, x) for table in tables for name, x in table.items() if _is_plain(x)]


def _stages_inside(homes: Mapping[str, ProcessMesh]) -> dict[str, list[ProcessMesh]]:
    """Return the stages of the layers inside each module around layers, in the order of the layers."""
    found: dict[str, list[ProcessMesh]] = {}
    for name, home in homes.items():
        for path in ("", *_paths_around(name)):
            found.setdefault(path, []).append(home)
    return found


def _paths_around(path: str) -> list[str]:
    """Return the paths of the modules around a module, without the model: "a.b.c" is inside "a" and "a.b"."""
    return [path[:at] for at, letter in enumerate(path) if letter == "."]


def _is_plain(x: object) -> bool:
    return x is not None and not isinstance(x, DistTensor)


class _SharedParameters:
    """Parameters of several layers: each is distributed once, and used by the other layers when they run."""

    def __init__(self) -> None:
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}

    def laid(self, x: Tensor, marked: Tensor, home: ProcessMesh) -> Tensor:
        """Return the distributed tensor for `x`: that of a layer, else the marked one, else replicated on `home`."""
        own = marked if isinstance(marked, DistTensor) else shard_tensor(x, home, [])
        return self._laid.setdefault(id(x), (x, own))[1]

    @contextmanager
    def kept(self, part: nn.Module) -> Generator[None]:
        """Replace, after the block, parameters of `part` that an earlier layer shares by that layer's tensors."""
        slots = [(m, name, p) for m in part.modules() for name, p in m._parameters.items() if p is not None]
        yield
        for module, name, old in slots:
            table: dict[str, Any] = module._parameters
            new = table[name]
            first = self._laid.setdefault(id(old), (old, new))[1]
            if first is not new:
                table[name] = first
                swap_parameters(module, {name: new.spec})


def _called_parts(part: nn.Module) -> list[nn.Module]:
    """Return the module itself, or the modules inside it if it cannot be called, such as a `ModuleList`."""
    if type(part).forward is not nn.Module.forward or "forward" in vars(part):
        return [part]
    return [inner for child in part.children() for inner in _called_parts(child)]


def _holds(part: nn.Module) -> bool:
    """True if a layer has tensors. A layer without tensors runs on the stage of its inputs."""
    return next(chain(part.parameters(), part.buffers()), None) is not None


def _keep_order(model: nn.Module, order: StageOrder) -> None:
    """Send a value to a stage only once during a call of `model`."""
    model.register_forward_pre_hook(lambda *_: order.begin())
    model.register_forward_hook(lambda *_: order.end(), always_call=True)


def _layers(model: nn.Module, at: Sequence[str] = ()) -> list[str]:
    """Return the modules of the list with the most parameters, and all modules beside it, in registered order.

    Modules around the names in `at` are taken apart too, and a model without a list that only wraps another module.
    """
    lists = {
        path: m for path, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    }
    longest = max(lists, key=lambda path: sum(p.numel() for p in lists[path].parameters()), default="")
    opened = {*_paths_around(longest), longest, *chain.from_iterable(map(_paths_around, at))}
    found: list[str] = []

    def walk(path: str) -> None:
        children = dict(model.get_submodule(path).named_children())
        for name, child in children.items():
            if isinstance(child, _LISTS_OF_PARAMETERS):
                continue  # the module around the list reads them
            inner = f"{path}.{name}" if path else name
            is_wrapped = not lists and len(children) == 1 and any(child.children())
            if inner in opened or is_wrapped:
                walk(inner)
            else:
                found.append(inner)

    walk("")
    return found


def _first_inside(name: str, layers: Sequence[str]) -> str:
    """Return the first layer inside the module of this name if the module is no layer itself; else the name."""
    inside = (layer for layer in layers if layer.startswith(f"{name}."))
    return name if name in layers else next(inside, name)


def even_starts(layers: Sequence[str], costs: Costs, chunks: int) -> list[str]:
    """Return the layers at which all chunks but the first begin, such that the most expensive chunk costs least."""
    if not 0 < chunks <= len(layers):
        return []
    total = [0.0, *accumulate(_prices(layers, costs))]
    tables = [[(cost, 0) for cost in total]]
    while len(tables) < chunks:
        tables.append(_one_more(tables[-1], total, len(tables)))
    starts: list[int] = []
    end = len(layers)
    for table in reversed(tables[1:]):
        end = table[end][1]
        starts.append(end)
    return [layers[k] for k in reversed(starts)]


def _prices(layers: Sequence[str], costs: Costs) -> list[float]:
    """Return the cost of each layer with all that is inside it."""
    found: dict[str, float] = dict.fromkeys(layers, 0.0)
    for path, cost in costs.items():
        for outer in (*_paths_around(path), path):
            if outer in found:
                found[outer] += cost
    return [found[name] for name in layers]


def _one_more(before: Sequence[tuple[float, int]], total: Sequence[float], least: int) -> list[tuple[float, int]]:
    """Return the tables of the dynamic program for one chunk more.

    Entry n is for the first n layers: the cost of the most expensive chunk, and the begin of the last chunk. The later
    the last chunk begins, the more the layers before it cost, and the less it costs itself. The best begin is where the
    two costs meet; of equal ones it is the first. `least` is the number of chunks before.
    """
    found = [(inf, 0)] * len(total)
    for end in range(least + 1, len(total)):
        places = range(least, end)
        at = bisect_left(places, True, key=lambda k, end=end: before[k][0] >= total[end] - total[k])
        later = before[places[at]][0] if at < len(places) else inf
        cost = min(later, total[end] - total[places[at - 1]] if at else inf)
        first = bisect_left(places, True, key=lambda k, end=end, cost=cost: total[end] - total[k] <= cost)
        found[end] = cost, places[first]
    return found


def _check(starts: Sequence[str], layers: Sequence[str], way: Sequence[int], stages: int) -> None:
    unknown = next((name for name in starts if name not in layers), None)
    shown = ", ".join(layers[:6]) + (", …" if len(layers) > 6 else "")
    if unknown is not None:
        found, why, write = f"no layer {unknown!r}", "a chunk begins at a layer", f"use names of {shown}"
    elif len(starts) + 1 != len(way):
        found = f"{len(starts) + 1} chunks of {len(layers)} layers"
        why, write = f"there must be {len(way)} chunks, on stages {tuple(way)}", f"pass {len(way) - 1} names of {shown}"
    elif set(way) != set(range(stages)):
        found, why = f"stages {tuple(way)}", f"the mesh has {stages} stages, and each needs a chunk"
        write = f"pass way={tuple(range(stages))}, or a way that visits every stage"
    else:
        return
    raise StageError("a model split for a pipeline", found, why, write)
