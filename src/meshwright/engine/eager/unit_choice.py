"""The choice of units: which parameters of a model are gathered together.

By default the blocks of each `ModuleList`, and of each `Sequential` of blocks of one class, are units. The rest is one
more unit, which stays whole while the model runs. So if the rest is larger than each block and than a bucket, each of
its modules is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from .._errors import StrategyError
from .gather_order import GatherOrder
from .parameter_unit import ParameterUnit, Slot, by_parameter

UnitNames = Sequence[str | Sequence[str]]
"""Patterns of module paths: a string makes a unit of each module that it matches, several strings make one unit."""
_BUCKET_BYTES = 25 * 2**20
_Modules = tuple[nn.Module, ...]


def units_of(
    model: nn.Module, slots: Iterable[Slot], names: UnitNames | None, order: GatherOrder
) -> list[ParameterUnit]:
    """Return the units of the parameters at these places of a model; the unit of the rest comes first.

    A module belongs to the innermost unit around it. A parameter that modules of several units use belongs to the rest.

    Raises:
        StrategyError: a pattern matches no module.
    """
    chosen = list(_blocks(model)) if names is None else _named(model, names)
    found, rest = _places_by_unit(model, chosen, slots)
    is_small = _bytes(rest) <= max([_BUCKET_BYTES, *map(_bytes, found.values())])
    groups = {(model,): rest} if is_small else _by_module(rest)
    return [ParameterUnit(modules, own, order) for modules, own in (*groups.items(), *found.items()) if own]


def _places_by_unit(
    model: nn.Module, chosen: Sequence[_Modules], slots: Iterable[Slot]
) -> tuple[dict[_Modules, list[Slot]], list[Slot]]:
    """Return the places of the parameters of each unit, and those of the rest."""
    units_of_module: dict[nn.Module, set[_Modules | None]] = {}
    _add_units(model, None, {module: unit for unit in chosen for module in unit}, units_of_module)
    found: dict[_Modules, list[Slot]] = {unit: [] for unit in chosen}
    rest: list[Slot] = []
    for places in by_parameter(slots):
        unit, *others = set[_Modules | None]().union(*(units_of_module[place.module] for place in places))
        target = rest if others or unit is None else found[unit]
        target += places
    return found, rest


def _add_units(
    module: nn.Module,
    around: _Modules | None,
    chosen: Mapping[nn.Module, _Modules],
    found: dict[nn.Module, set[_Modules | None]],
) -> None:
    """Add the innermost unit around a module, and those of its parts; a module in several places may have several."""
    unit = chosen.get(module, around)
    known = found.setdefault(module, set())
    if unit not in known:
        known.add(unit)
        for child in module.children():
            _add_units(child, unit, chosen, found)


def _blocks(module: nn.Module) -> Iterator[_Modules]:
    """Yield the blocks of the outermost lists of blocks, each as a unit. A block that is a list itself never runs."""
    children = list(module.children())
    for child in children:
        if _is_list_of_blocks(module, children) and not isinstance(child, _LISTS):
            yield (child,)
        else:
            yield from _blocks(child)


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _is_list_of_blocks(module: nn.Module, children: Sequence[nn.Module]) -> bool:
    is_chain = isinstance(module, nn.Sequential) and len(children) > 1
    return isinstance(module, nn.ModuleList) or (is_chain and len({type(child) for child in children}) == 1)


def _named(model: nn.Module, names: UnitNames) -> list[_Modules]:
    """Return the units that patterns name."""
    modules = dict(model.named_modules())
    units: list[_Modules] = []
    for entry in names:
        if isinstance(entry, str):
            units += [(module,) for module in _matching(model, modules, entry)]
        else:
            units.append(tuple(dict.fromkeys(m for name in entry for m in _matching(model, modules, name))))
    return list(dict.fromkeys(units))


def _matching(model: nn.Module, modules: Mapping[str, nn.Module], pattern: str) -> list[nn.Module]:
    found = [module for path, module in modules.items() if _matches(path, pattern)]
    if not found:
        near = get_close_matches(pattern, modules, n=3, cutoff=0.3)
        raise StrategyError(
            f"the unit {pattern!r}",
            f"no module of {type(model).__name__} with such a path",
            "a unit names modules whose parameters are gathered together; * is any name between two dots",
            f"write {' or '.join(map(repr, near)) or 'a path of model.named_modules()'}",
        )
    return found


def _matches(path: str, pattern: str) -> bool:
    """True if a module path matches a pattern name by name: `layers.*` matches `layers.0`, but not `layers.0.norm`."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _by_module(slots: Iterable[Slot]) -> dict[_Modules, list[Slot]]:
    """Return units of single modules; parameters of several modules are left out, so that they are gathered alone."""
    found: dict[_Modules, list[Slot]] = {}
    for places in by_parameter(slots):
        if len({place.module for place in places}) == 1:
            found.setdefault((places[0].module,), []).extend(places)
    return found


def _bytes(slots: Iterable[Slot]) -> int:
    """Return the bytes of the gathered parameters."""
    return sum(places[0].get().spec.nbytes for places in by_parameter(slots))
