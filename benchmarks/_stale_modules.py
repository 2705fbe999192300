"""Kinds of change: flags of modules, and submodules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ._stale_case import Case, Change, Net, Run, calls, kind, kind_on_mesh, sets, switch


def with_layer(layer: nn.Module, change: Change) -> Case:
    """Return a training with a layer between the linear layers of its model."""
    return calls(lambda self, x: self.layer(x), change, layer=layer)


# --- flags -----------------------------------------------------------------------------------------------------------


@kind_on_mesh
def dropout_set_to_evaluation(run: Run) -> Case:
    layer = nn.Dropout(0.5)
    return with_layer(layer, switch(True, False, layer.train))


@kind
def probability_of_a_dropout(run: Run) -> Case:
    layer = nn.Dropout(0.5)
    return with_layer(layer, sets(layer, "p", 0.5, 0.1))


@kind
def probability_of_a_dropout_from_zero(run: Run) -> Case:
    layer = nn.Dropout(0.0)
    return with_layer(layer, sets(layer, "p", 0.0, 0.5))


@kind
def batch_norm_set_to_evaluation(run: Run) -> Case:
    layer = nn.BatchNorm1d(6)
    return with_layer(layer, switch(True, False, layer.train))


@kind
def momentum_of_a_batch_norm(run: Run) -> Case:
    layer = nn.BatchNorm1d(6)
    return with_layer(layer, sets(layer, "momentum", 0.1, 0.5))


@kind
def momentum_of_a_batch_norm_set_to_none(run: Run) -> Case:
    layer = nn.BatchNorm1d(6)
    return with_layer(layer, sets(layer, "momentum", 0.1, None))


@kind
def epsilon_of_a_batch_norm(run: Run) -> Case:
    layer = nn.BatchNorm1d(6)
    return with_layer(layer, sets(layer, "eps", 1e-5, 0.5))


@kind
def running_statistics_of_a_batch_norm(run: Run) -> Case:
    layer = nn.BatchNorm1d(6)
    return with_layer(layer, sets(layer, "track_running_stats", True, False))


@kind_on_mesh
def epsilon_of_a_layer_norm(run: Run) -> Case:
    layer = nn.LayerNorm(6)
    return with_layer(layer, sets(layer, "eps", 1e-5, 0.5))


@kind
def groups_of_a_group_norm(run: Run) -> Case:
    layer = nn.GroupNorm(2, 6)
    return with_layer(layer, sets(layer, "num_groups", 2, 3))


@kind
def slope_of_a_leaky_relu(run: Run) -> Case:
    layer = nn.LeakyReLU(0.1)
    return with_layer(layer, sets(layer, "negative_slope", 0.1, 0.5))


@kind
def approximation_of_a_gelu(run: Run) -> Case:
    layer = nn.GELU()
    change = sets(layer, "approximate", "none", "tanh")
    return calls(lambda self, x: self.layer(x * 2.0) * 10.0, change, layer=layer)


@kind
def dim_of_a_softmax(run: Run) -> Case:
    layer = nn.Softmax(dim=1)
    return with_layer(layer, sets(layer, "dim", 1, 0))


@kind
def inplace_flag_of_a_relu(run: Run) -> Case:
    """Return a training with a ReLU in place: the values that are added again are those after the ReLU."""
    layer = nn.ReLU()

    def between(self: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        return self.layer(x) + x

    return calls(between, sets(layer, "inplace", False, True), layer=layer)


@kind_on_mesh
def flag_that_switches_a_branch(run: Run) -> Case:
    def between(self: Any, x: Tensor) -> Tensor:
        return x.tanh() if self.bends else x

    case = calls(between, lambda factor: setattr(case.model, "bends", factor == 1), bends=True)
    return case


@kind
def training_flag_read_by_the_model(run: Run) -> Case:
    """Return a training whose model reads its own flag, which is set to evaluation between training steps."""
    model = Net()
    model.scale = lambda: 1.0 if model.training else 2.0
    return Case(model, switch(True, False, model.train))


@kind
def number_of_heads(run: Run) -> Case:
    def between(self: Any, x: Tensor) -> Tensor:
        q = x.view(len(x), self.heads, -1)
        return (q @ q.mT).softmax(-1).matmul(q).flatten(1)

    case = calls(between, lambda factor: setattr(case.model, "heads", 1 if factor == 1 else 2), heads=1)
    return case


# --- submodules ------------------------------------------------------------------------------------------------------


def in_order(self: Any, x: Tensor) -> Tensor:
    """Call the layers of a list."""
    for layer in self.layers:
        x = layer(x)
    return x


def first_two() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.ReLU())]


@kind
def module_list_reordered(run: Run) -> Case:
    layers = nn.ModuleList(first_two())

    def change(factor: float) -> None:
        layers[0], layers[1] = layers[1], layers[0]

    return calls(in_order, change, layers=layers)


@kind
def module_list_append(run: Run) -> Case:
    layers = nn.ModuleList(first_two())
    return calls(in_order, lambda factor: layers.append(nn.Tanh()), layers=layers)


@kind
def sequential_entry_replaced(run: Run) -> Case:
    layers: Any = nn.Sequential(*first_two())
    return calls(in_order, switch(nn.ReLU(), nn.Sigmoid(), lambda m: layers[1].__setitem__(1, m)), layers=layers)


@kind
def key_into_a_module_dict(run: Run) -> Case:
    layers = nn.ModuleDict({"tanh": nn.Tanh(), "relu": nn.ReLU()})
    case = calls(
        lambda self, x: self.layers[self.key](x),
        lambda factor: setattr(case.model, "key", "tanh" if factor == 1 else "relu"),
        layers=layers,
        key="tanh",
    )
    return case


@kind
def entry_of_a_module_dict_replaced(run: Run) -> Case:
    layers = nn.ModuleDict({"act": nn.Tanh()})
    return calls(lambda self, x: self.layers["act"](x), lambda f: layers.update({"act": nn.ReLU()}), layers=layers)


@kind
def list_of_modules_that_are_no_submodules(run: Run) -> Case:
    layers: list[nn.Module] = [nn.Tanh(), nn.ReLU()]
    return calls(lambda self, x: self.layers[0](x), lambda factor: layers.reverse(), layers=layers)


@kind
def attribute_of_a_module_that_is_no_submodule(run: Run) -> Case:
    layer = nn.LeakyReLU(0.1)
    return calls(lambda self, x: self.layers[0](x), sets(layer, "negative_slope", 0.1, 0.5), layers=[layer])


@kind_on_mesh
def submodule_replaced(run: Run) -> Case:
    return with_act(nn.Tanh(), nn.ReLU())


def with_act(off: nn.Module, on: nn.Module) -> Case:
    """Return a training whose submodule `act` is one or the other."""
    case = calls(lambda self, x: self.act(x), lambda f: setattr(case.model, "act", off if f == 1 else on), act=off)
    return case


@kind
def submodule_replaced_by_one_of_the_same_class(run: Run) -> Case:
    return with_act(nn.LeakyReLU(0.1), nn.LeakyReLU(0.5))


@kind
def layer_with_parameters_replaced(run: Run) -> Case:
    model = Net()
    return Case(model, lambda factor: setattr(model, "b", nn.Linear(6, 3)))


@kind
def submodule_set_to_none(run: Run) -> Case:
    case = calls(
        lambda self, x: x if self.act is None else self.act(x),
        lambda factor: setattr(case.model, "act", nn.Tanh() if factor == 1 else None),
        act=nn.Tanh(),
    )
    return case
