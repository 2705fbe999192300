"""Kinds of change: objects with special methods, attributes by computed names, weak references."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from functools import cached_property
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ._stale_case import Case, Net, Run, attribute, by_loss_too, calls, item, kind, kind_on_mesh, reads, replaces


@dataclasses.dataclass
class Config:
    """A configuration as in typical training scripts."""

    scale: float = 1.0
    inner: Any = None


# --- objects with methods of Python's own ----------------------------------------------------------------------------


class Table(Mapping[str, float]):
    """A user-defined mapping."""

    def __init__(self) -> None:
        self.values_by_name = {"scale": 1.0}

    def __getitem__(self, key: str) -> float:
        return self.values_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


class Weight:
    """A number with state."""

    def __init__(self) -> None:
        self.value = 1.0

    def __float__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        return self.value == 1

    def __len__(self) -> int:
        return int(self.value)

    def __iter__(self) -> Iterator[float]:
        yield self.value

    def __eq__(self, other: object) -> bool:
        return other == self.value

    __hash__ = None  # pyright: ignore[reportAssignmentType] - changes

    def __rmul__(self, x: Tensor) -> Tensor:
        return x.mul(self.value)


@by_loss_too
@kind
def item_of_a_user_defined_mapping(run: Run) -> Case:
    table = Table()
    return reads(run, lambda self: self.table["scale"], item(table.values_by_name, "scale"), table=table)


@by_loss_too
@kind
def object_converted_to_a_number(run: Run) -> Case:
    weight = Weight()
    return reads(run, lambda self: float(self.weight), attribute(weight, "value"), weight=weight)


@by_loss_too
@kind
def object_asked_for_its_truth(run: Run) -> Case:
    weight = Weight()
    return reads(run, lambda self: 1.0 if self.weight else 2.0, attribute(weight, "value"), weight=weight)


@by_loss_too
@kind
def object_asked_for_its_length(run: Run) -> Case:
    weight = Weight()
    return reads(run, lambda self: float(len(self.weight)), attribute(weight, "value"), weight=weight)


@by_loss_too
@kind
def object_iterated_over(run: Run) -> Case:
    weight = Weight()
    return reads(run, lambda self: sum(self.weight), attribute(weight, "value"), weight=weight)


@by_loss_too
@kind
def object_compared(run: Run) -> Case:
    weight = Weight()
    return reads(run, lambda self: 1.0 if self.weight == 1.0 else 2.0, attribute(weight, "value"), weight=weight)


@kind
def object_that_multiplies_a_tensor(run: Run) -> Case:
    weight = Weight()
    return calls(lambda self, x: x.tanh() * self.weight, attribute(weight, "value"), weight=weight)


class Computed:
    """An object whose attributes are computed from a dict."""

    def __init__(self) -> None:
        self.table = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name == "table":
            raise AttributeError(name)
        return self.table[name]


class Intercepted:
    """An object that multiplies an attribute whenever it is read."""

    def __init__(self) -> None:
        self.factor, self.scale = 1.0, 1.0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return found * self.factor if name == "scale" else found


@by_loss_too
@kind
def attribute_computed_by_getattr(run: Run) -> Case:
    config = Computed()
    return reads(run, lambda self: self.config.scale, item(config.table, "scale"), config=config)


@by_loss_too
@kind
def attribute_computed_by_getattribute(run: Run) -> Case:
    config = Intercepted()
    return reads(run, lambda self: self.config.scale, attribute(config, "factor"), config=config)


class Lazy:
    """A configuration with a cached property and a property."""

    def __init__(self) -> None:
        self.raw = 1.0

    @cached_property
    def scale(self) -> float:
        return self.raw

    @property
    def doubled(self) -> float:
        return 2.0 * self.raw


@by_loss_too
@kind
def cached_property_reset(run: Run) -> Case:
    config = Lazy()

    def change(factor: float) -> None:
        config.raw = factor
        vars(config).pop("scale", None)

    return reads(run, lambda self: self.config.scale, change, config=config)


@by_loss_too
@kind
def attribute_behind_a_property(run: Run) -> Case:
    config = Lazy()
    return reads(run, lambda self: self.config.doubled, attribute(config, "raw"), config=config)


@by_loss_too
@kind
def class_of_a_configuration_reassigned(run: Run) -> Case:
    class Double(Config):
        scale = property(lambda self: 2.0)  # pyright: ignore[reportAssignmentType]

    config = Config()

    def change(factor: float) -> None:
        config.__class__ = Config if factor == 1 else Double

    return reads(run, lambda self: self.config.scale, change, config=config)


# --- attributes by computed names ------------------------------------------------------------------------------------


@by_loss_too
@kind_on_mesh
def attribute_by_a_computed_name(run: Run) -> Case:
    config: Any = SimpleNamespace(scale_0=1.0, scale_1=1.0)

    def read(self: Any) -> float:
        found = 1.0
        for i in range(2):
            found = found * getattr(self.config, f"scale_{i}")
        return found

    return reads(run, read, attribute(config, "scale_1"), config=config)


@by_loss_too
@kind
def attribute_by_an_attrgetter(run: Run) -> Case:
    config = Config(inner=Config())
    read = attrgetter("inner.scale")
    return reads(run, lambda self: read(self.config), attribute(config.inner, "scale"), config=config)


@by_loss_too
@kind
def key_by_an_itemgetter(run: Run) -> Case:
    settings, read = {"scale": 1.0}, itemgetter("scale")
    return reads(run, lambda self: read(self.settings), item(settings, "scale"), settings=settings)


@by_loss_too
@kind
def attribute_by_vars_of_the_model(run: Run) -> Case:
    return replaces(run, lambda self: vars(self)["factor"], "factor", float)


@by_loss_too
@kind
def attribute_by_dict_of_the_model(run: Run) -> Case:
    return replaces(run, lambda self: self.__dict__["factor"], "factor", float)


@by_loss_too
@kind
def attribute_that_the_model_has_or_has_not(run: Run) -> Case:
    def change(factor: float) -> None:
        delattr(case.read_from, "extra") if factor == 1 else setattr(case.read_from, "extra", factor)

    case = reads(run, lambda self: getattr(self, "extra", 1.0), change)
    return case


@by_loss_too
@kind
def fields_of_a_dataclass(run: Run) -> Case:
    config = Config()
    return reads(run, lambda self: dataclasses.asdict(self.config)["scale"], attribute(config, "scale"), config=config)


# --- weak references -------------------------------------------------------------------------------------------------


@by_loss_too
@kind
def weak_reference_replaced(run: Run) -> Case:
    configs = {factor: Config(factor) for factor in (1.0, 2.0, 3.0)}
    case = replaces(run, lambda self: self.ref().scale, "ref", lambda factor: weakref.ref(configs[factor]))
    run.callback(configs.clear)
    return case


@by_loss_too
@kind
def target_of_a_weak_reference(run: Run) -> Case:
    config = Config()
    run.callback(attribute(config, "scale"), 1.0)  # keeps the target alive
    return reads(run, lambda self: self.ref().scale, attribute(config, "scale"), ref=weakref.ref(config))


@kind
def weak_reference_whose_target_dies(run: Run) -> Case:
    held = [Config()]

    class Model(Net):
        def scale(self) -> float:
            return 1.0 if self.ref() is not None else 2.0

    def change(factor: float) -> None:
        held.clear()

    return Case(Model(ref=weakref.ref(held[0])), change)


@by_loss_too
@kind
def entry_of_a_weak_dictionary(run: Run) -> Case:
    configs = {factor: Config(factor) for factor in (1.0, 2.0, 3.0)}
    registry = weakref.WeakValueDictionary({"config": configs[1.0]})

    def change(factor: float) -> None:
        registry["config"] = configs[factor]

    return reads(run, lambda self: self.registry["config"].scale, change, registry=registry)
