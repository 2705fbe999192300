"""Kinds of change: the same settings if a model runs in pieces, in microbatches, or with recomputation."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from ._stale_case import Case, Net, Run, attribute, item, kind, reads, sets

SETTINGS = {"scale": 1.0}


def strategic(case: Case, **options: Any) -> Case:
    """Return the case with options of a strategy."""
    return dataclasses.replace(case, strategy=mw.Strategy.of(**options))


# --- pieces ----------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """A module that is a program of its own, and reads its settings."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(6, 6)
        self.settings, self.act = settings, nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x)) * self.settings["scale"] * SETTINGS["scale"]


class Asks(Net):
    """A model that reads a number of a tensor, so that only its parts can be programs."""

    def between(self, x: Tensor) -> Tensor:
        return self.piece(x if x.abs().max().item() < 100.0 else x / 100.0) * self.scale()


def in_pieces(case: Case) -> Case:
    return strategic(case, full_graph=False)


@kind
def dict_of_a_piece(run: Run) -> Case:
    settings = {"scale": 1.0}
    return in_pieces(Case(Asks(piece=Piece(settings)), item(settings, "scale")))


@kind
def global_that_a_piece_reads(run: Run) -> Case:
    run.set_item(SETTINGS, "scale", 1.0)
    return in_pieces(Case(Asks(piece=Piece({"scale": 1.0})), item(SETTINGS, "scale")))


@kind
def layer_of_a_piece(run: Run) -> Case:
    piece = Piece({"scale": 1.0})
    return in_pieces(Case(Asks(piece=piece), sets(piece.act, "negative_slope", 0.1, 0.5)))


@kind
def method_of_a_piece_replaced_on_its_class(run: Run) -> Case:
    class Local(Piece):
        pass

    def change(factor: float) -> None:
        Local.forward = lambda self, x: Piece.forward(self, x) * factor

    return in_pieces(Case(Asks(piece=Local({"scale": 1.0})), change))


@kind
def class_attribute_of_a_piece(run: Run) -> Case:
    class Local(Piece):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    return in_pieces(Case(Asks(piece=Local({"scale": 1.0})), attribute(Local, "factor")))


@kind
def state_of_a_hook_of_a_piece(run: Run) -> Case:
    piece, factors = Piece({"scale": 1.0}), [1.0]
    piece.layer.register_forward_hook(lambda module, given, out: out * factors[0])
    return in_pieces(Case(Asks(piece=piece), item(factors, 0)))


@kind
def attribute_that_python_reads_between_pieces(run: Run) -> Case:
    model = Asks(piece=Piece({"scale": 1.0}), factor=1.0)
    model.scale = lambda: model.factor
    return in_pieces(Case(model, attribute(model, "factor")))


# --- other strategies ------------------------------------------------------------------------------------------------

MERGE: dict[str, Any] = {"gradient_merge": {"enable": True, "k_steps": 2}}


@kind
def config_with_merged_gradients(run: Run) -> Case:
    config = SimpleNamespace(scale=1.0)
    return strategic(reads(run, lambda self: self.config.scale, attribute(config, "scale"), config=config), **MERGE)


@kind
def loss_weight_with_merged_gradients(run: Run) -> Case:
    weights = {"mse": 1.0}
    case = Case(Net(), item(weights, "mse"), loss=lambda out, y: F.mse_loss(out, y) * weights["mse"])
    return strategic(case, **MERGE)


@kind
def class_attribute_with_merged_gradients(run: Run) -> Case:
    class Model(Net):
        factor = 1.0

        def scale(self) -> float:
            return self.factor

    return strategic(Case(Model(), attribute(Model, "factor")), **MERGE)


@kind
def config_of_a_recomputed_layer(run: Run) -> Case:
    settings = {"scale": 1.0}
    model = Net(piece=Piece(settings))
    model.between = model.piece.__call__
    return strategic(Case(model, item(settings, "scale")), recompute={"enable": True, "layers": ["piece"]})


@kind
def class_attribute_of_a_recomputed_layer(run: Run) -> Case:
    class Local(Piece):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    model = Net(piece=Local({"scale": 1.0}))
    model.between = model.piece.__call__
    return strategic(Case(model, attribute(Local, "factor")), recompute={"enable": True, "layers": ["piece"]})
