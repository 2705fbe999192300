"""Changes between two calls of a static model are detected, added and replaced hooks included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import CaptureError

Step = Callable[[Tensor, Tensor], Tensor]


def losses_with_changing_hooks(static: bool) -> Iterator[float]:
    """Yield the losses of steps between which hooks are added and removed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist_model = mw.to_static(model, None, F.mse_loss, optimizer) if static else None
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    weight = model[0].weight

    def step() -> float:
        if dist_model is not None:
            return dist_model(x, y).item()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    yield step()
    for factor in (10, 0.1):
        handle = weight.register_hook(lambda grad, factor=factor: grad * factor)
        yield step()
        handle.remove()
    for factor in (2, 3):
        handle = model[0].register_forward_hook(lambda _, given, out, factor=factor: out * factor)
        yield step()
        handle.remove()
    yield step()


def test_added_and_removed_hooks_are_detected() -> None:
    static, eager = (mw.simulate(lambda s=s: list(losses_with_changing_hooks(s)), 1)[0] for s in (True, False))
    assert static == pytest.approx(eager, rel=1e-6)


FACTOR: Any = 1.0
"""A global that functions of this file read."""


class Scaled:
    """A loss with a setting of its own, and a method that is also a loss."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.factor

    def method(self, out: Tensor, y: Tensor) -> Tensor:
        return self(out, y)


class Reads(nn.Linear):
    """A layer whose forward pass calls a function that reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled(super().forward(x))


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def of_closure() -> tuple[Any, Callable[[float], None]]:
    factor = 1.0

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return (lambda out, y: F.mse_loss(out, y) * factor), change


def of_global(kind: Callable[[float], Any] = float) -> tuple[Any, Callable[[float], None]]:
    def change(to: float) -> None:
        globals()["FACTOR"] = kind(to)

    change(1.0)
    return partial(lambda f, out, y: f(F.mse_loss(out, y)), scaled), change


def of_object(method: bool = False) -> tuple[Any, Callable[[float], None]]:
    loss = Scaled()
    return loss.method if method else loss, partial(setattr, loss, "factor")


def of_namespace() -> tuple[Any, Callable[[float], None]]:
    options = SimpleNamespace(loss={"factor": 1.0})
    return (lambda out, y: F.mse_loss(out, y) * options.loss["factor"]), partial(options.loss.__setitem__, "factor")


READ = {
    "closure": of_closure, "global": of_global, "global tensor": partial(of_global, torch.tensor), "object": of_object,
    "method": partial(of_object, True), "namespace": of_namespace,
}  # fmt: skip


@pytest.mark.parametrize("where", READ)
@pytest.mark.parametrize("layer", [nn.Linear, Reads])
def test_changes_of_globals_and_closures_are_detected(where: str, layer: type[nn.Linear]) -> None:
    x, y = torch.ones(3, 4), torch.zeros(3, 2)

    def go() -> tuple[list[float], list[float], int]:
        torch.manual_seed(0)
        loss, change = READ[where]()
        model = layer(4, 2)
        dist_model = mw.to_static(model, None, loss)
        found, wanted = list[float](), list[float]()
        for factor in (1.0, 2.0, 2.0, 1.0):
            change(factor)
            found.append(dist_model(x, y).item())
            wanted.append(loss(model(x), y).item())
        return found, wanted, dist_model.recordings

    found, wanted, recordings = mw.simulate(go, 1)[0]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert found[0] != found[1]
    assert recordings == (4 if where == "global tensor" else 2)  # each is another tensor


CALLS = [0]


def test_a_loss_that_counts_its_calls_is_refused() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        CALLS[0] += 1
        return F.mse_loss(out, y)

    def go() -> None:
        dist_model = mw.to_static(nn.Linear(4, 2), None, loss)
        with pytest.raises(CaptureError, match="CALLS"):
            dist_model(torch.ones(3, 4), torch.zeros(3, 2))

    mw.simulate(go, 1)
    assert CALLS == [0]


@dataclass
class Options:
    """A configuration as in typical scripts."""

    gamma: float = 1.0
    name: str = "none"


class Trainer:
    """An object with the loss of a model, and many attributes that the loss does not read."""

    scale = 1.0

    def __init__(self) -> None:
        self.options = Options()
        self.global_step = 0
        self.losses: list[float] = []
        self.factor = 1.0

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.factor * self.scale * self.gamma() * self.weight

    def gamma(self) -> float:
        return self.options.gamma

    @property
    def weight(self) -> float:
        return SETTINGS.weight


class Finer(Trainer):
    """A trainer that calls its base class."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return super().loss(out, y) * 0.5


SETTINGS = ModuleType("settings")
SETTINGS.weight = 1.0  # type: ignore[attr-defined]
SETTINGS.__file__ = __file__
CHANGES: dict[str, Callable[[Trainer], None]] = {
    "attribute": lambda t: setattr(t, "factor", 2.0),
    "of the class": lambda t: setattr(type(t), "scale", 2.0),
    "on the object": lambda t: setattr(t, "scale", 2.0),
    "nested": lambda t: setattr(t.options, "gamma", 2.0),
    "another": lambda t: setattr(t, "options", Options(2.0)),
    "module": lambda t: setattr(SETTINGS, "weight", 2.0),
}
UNREAD: dict[str, Callable[[Trainer], None]] = {
    "count": lambda t: setattr(t, "global_step", t.global_step + 1),
    "list": lambda t: t.losses.append(1.0),
    "nested": lambda t: setattr(t.options, "name", f"step {t.global_step}"),
    "new": lambda t: setattr(t, "best", 1.0),
}


@pytest.fixture
def trainers() -> Iterator[None]:
    """Restore classes and modules after the test."""
    yield
    for kind in (Trainer, Finer):
        if kind is Trainer or "scale" in vars(kind):
            kind.scale = 1.0
    SETTINGS.weight = 1.0  # type: ignore[attr-defined]


def told_by(trainer: Trainer, way: str) -> Any:
    if way == "method":
        return trainer.loss
    if way == "lambda":
        return lambda out, y: 1.0 * trainer.loss(out, y)
    return partial(Trainer.loss, trainer)


@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize("way", ["method", "lambda", "partial"])
@pytest.mark.parametrize("kind", [Trainer, Finer])
@pytest.mark.parametrize("change", CHANGES)
def test_only_trainer_attributes_that_the_loss_reads_count(change: str, kind: type[Trainer], way: str) -> None:
    x, y = torch.ones(3, 4), torch.zeros(3, 2)

    def go() -> tuple[list[float], list[float], int]:
        torch.manual_seed(0)
        trainer, model = kind(), nn.Linear(4, 2)
        loss = told_by(trainer, way)
        dist_model = mw.to_static(model, None, loss)
        found, wanted = list[float](), list[float]()
        for step in range(6):
            for what in UNREAD.values():
                what(trainer)
            if step == 3:
                CHANGES[change](trainer)
            found.append(dist_model(x, y).item())
            wanted.append(loss(model(x), y).item())
        return found, wanted, dist_model.recordings

    found, wanted, recordings = mw.simulate(go, 1)[0]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert found[5] == pytest.approx(2 * found[0], rel=1e-6)
    assert recordings == 2


class Keeps(Trainer):
    """A trainer that stores its inputs, which a program would do only once."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        found = super().loss(out, y)
        self.last = found
        return found


def kept(trainer: Any, found: Tensor) -> Tensor:
    trainer.last = found
    return found


class HandsOn(Trainer):
    """A trainer that passes itself to other code."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return kept(self, super().loss(out, y))


class Counts(Trainer):
    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        self.global_step += 1
        return super().loss(out, y)


@pytest.mark.parametrize("kind", [Keeps, HandsOn])
def test_a_tensor_that_a_loss_leaves_on_its_trainer_is_not_read_later(kind: type[Trainer]) -> None:
    def go() -> None:
        trainer: Any = kind()
        mw.to_static(nn.Linear(4, 2), None, trainer.loss)(torch.ones(3, 4), torch.zeros(3, 2))
        with pytest.raises(CaptureError, match="last"):
            trainer.last.item()

    mw.simulate(go, 1)


def test_a_loss_that_counts_on_its_trainer_is_refused() -> None:
    def go() -> None:
        trainer = Counts()
        dist_model = mw.to_static(nn.Linear(4, 2), None, trainer.loss)
        with pytest.raises(CaptureError, match="global_step"):
            dist_model(torch.ones(3, 4), torch.zeros(3, 2))
        assert trainer.global_step == 0

    mw.simulate(go, 1)
