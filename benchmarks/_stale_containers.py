"""Kinds of change: elements of dicts, lists and sets."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from types import MappingProxyType
from typing import Any, TypedDict

from ._stale_case import Case, Run, attribute, by_loss_too, item, kind, kind_on_mesh, reads, replaces


@by_loss_too
@kind_on_mesh
def value_of_a_dict(run: Run) -> Case:
    settings = {"scale": 1.0}
    return reads(run, lambda self: self.settings["scale"], item(settings, "scale"), settings=settings)


@by_loss_too
@kind
def new_key_of_a_dict(run: Run) -> Case:
    settings: dict[str, float] = {}

    def change(factor: float) -> None:
        settings.pop("scale", None) if factor == 1 else settings.update(scale=factor)

    return reads(run, lambda self: self.settings.get("scale", 1.0), change, settings=settings)


@by_loss_too
@kind
def keys_of_a_dict_that_are_counted(run: Run) -> Case:
    losses = {"main": 1.0, "other": 1.0}

    def change(factor: float) -> None:
        losses.update(other=1.0) if factor == 1 else losses.pop("other", None)

    return reads(run, lambda self: 1.0 / len(self.losses), change, losses=losses)


@by_loss_too
@kind
def value_eight_levels_deep(run: Run) -> Case:
    settings: Any = {"scale": 1.0}
    innermost = settings
    for _ in range(7):
        settings = {"next": settings}

    def read(self: Any) -> float:
        found = self.settings
        while "next" in found:
            found = found["next"]
        return found["scale"]

    return reads(run, read, item(innermost, "scale"), settings=settings)


@by_loss_too
@kind
def key_order_of_a_dict(run: Run) -> Case:
    weights = {"first": 1.0, "second": 2.0}

    def change(factor: float) -> None:
        weights["first"] = weights.pop("first")
        if factor == 1:
            weights["second"] = weights.pop("second")

    return reads(run, lambda self: next(iter(self.weights.values())), change, weights=weights)


@by_loss_too
@kind
def order_of_an_ordered_dict(run: Run) -> Case:
    weights = OrderedDict(first=1.0, second=2.0)

    def change(factor: float) -> None:
        weights.move_to_end("first", last=factor != 1)

    return reads(run, lambda self: next(iter(self.weights.values())), change, weights=weights)


@by_loss_too
@kind
def value_in_a_dict_of_5000(run: Run) -> Case:
    table = dict.fromkeys(range(5000), 1.0)
    return reads(run, lambda self: self.table[3333], item(table, 3333), table=table)


@by_loss_too
@kind
def defaultdict_value(run: Run) -> Case:
    weights: defaultdict[str, float] = defaultdict(lambda: 1.0, scale=1.0)
    return reads(run, lambda self: self.weights["scale"], item(weights, "scale"), weights=weights)


@by_loss_too
@kind
def counter_value(run: Run) -> Case:
    seen = Counter(words=1)
    return reads(run, lambda self: float(self.seen["words"]), lambda factor: seen.update(words=1), seen=seen)


@by_loss_too
@kind
def user_dict_value(run: Run) -> Case:
    settings = UserDict(scale=1.0)
    return reads(run, lambda self: self.settings["scale"], item(settings, "scale"), settings=settings)


@by_loss_too
@kind
def map_below_a_chain_map(run: Run) -> Case:
    defaults = {"scale": 1.0}
    settings = ChainMap({"other": 1.0}, defaults)
    return reads(run, lambda self: self.settings["scale"], item(defaults, "scale"), settings=settings)


@by_loss_too
@kind
def dict_behind_a_mapping_proxy(run: Run) -> Case:
    settings = {"scale": 1.0}
    return reads(run, lambda self: self.view["scale"], item(settings, "scale"), view=MappingProxyType(settings))


class Typed(TypedDict):
    scale: float


@by_loss_too
@kind
def typed_dict_value(run: Run) -> Case:
    settings = Typed(scale=1.0)
    return reads(run, lambda self: self.settings["scale"], item(settings, "scale"), settings=settings)


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes, as in configuration libraries."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@by_loss_too
@kind_on_mesh
def dict_with_attributes(run: Run) -> Case:
    settings = AttributeDict(model=AttributeDict(scale=1.0))
    return reads(run, lambda self: self.settings.model.scale, item(settings.model, "scale"), settings=settings)


class Defaults(dict[str, float]):
    """A dict that computes missing values."""

    default = 1.0

    def __missing__(self, key: str) -> float:
        return self.default


@by_loss_too
@kind
def default_of_a_dict_with_missing(run: Run) -> Case:
    settings = Defaults()
    return reads(run, lambda self: self.settings["scale"], attribute(settings, "default"), settings=settings)


# --- sequences and sets ----------------------------------------------------------------------------------------------


@by_loss_too
@kind
def element_of_a_list_of_5000(run: Run) -> Case:
    values = [1.0] * 5000
    return reads(run, lambda self: self.values[3333], item(values, 3333), values=values)


@by_loss_too
@kind_on_mesh
def list_append(run: Run) -> Case:
    values = [1.0]
    return reads(run, lambda self: sum(self.values), values.append, values=values)


@by_loss_too
@kind
def list_reordered(run: Run) -> Case:
    values = [1.0, 2.0]
    return reads(run, lambda self: self.values[0], lambda factor: values.reverse(), values=values)


@by_loss_too
@kind
def element_of_nested_lists(run: Run) -> Case:
    values = [[[0.0], [0.0, 1.0]]]
    return reads(run, lambda self: self.values[0][1][1], item(values[0][1], 1), values=values)


@by_loss_too
@kind
def list_in_a_tuple_in_a_dict(run: Run) -> Case:
    scales = [1.0]
    return reads(run, lambda self: self.settings["pair"][1][0], item(scales, 0), settings={"pair": ("scales", scales)})


@by_loss_too
@kind
def user_list_element(run: Run) -> Case:
    values = UserList([1.0])
    return reads(run, lambda self: self.values[0], item(values, 0), values=values)


@by_loss_too
@kind
def deque_rotated(run: Run) -> Case:
    values = deque([1.0, 2.0, 3.0], maxlen=3)
    return reads(run, lambda self: self.values[0], lambda factor: values.rotate(1), values=values)


@by_loss_too
@kind
def tuple_replaced(run: Run) -> Case:
    return replaces(run, lambda self: self.betas[0] * self.betas[1], "betas", lambda factor: (factor, 0.5))


@by_loss_too
@kind
def range_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(len(self.layers)), "layers", lambda factor: range(int(factor)))


@by_loss_too
@kind
def membership_of_a_set(run: Run) -> Case:
    on = {"bias"}

    def change(factor: float) -> None:
        on.discard("scale") if factor == 1 else on.add("scale")

    return reads(run, lambda self: 2.0 if "scale" in self.on else 1.0, change, on=on)


@by_loss_too
@kind
def set_below_an_object_of_the_standard_library(run: Run) -> Case:
    on = {"bias"}

    def change(factor: float) -> None:
        on.discard("scale") if factor == 1 else on.add("scale")

    return reads(run, lambda self: 2.0 if "scale" in self.on["all"] else 1.0, change, on=ChainMap({"all": on}))


@by_loss_too
@kind
def frozenset_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(len(self.on)), "on", lambda factor: frozenset(range(int(factor))))
