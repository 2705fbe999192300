"""Parts of a kind of change between training steps: the training that a kind builds, and the table of kinds.

A kind is a function that builds a `Case`: a model, its loss, its optimizer and a function that changes a setting. The
setting holds a *factor*. `Run.factors` has the factor of each step, and the change is applied before each step whose
factor is another one. Most kinds multiply by the factor; a switch is on where the factor is not 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import meshwright as mw

FACTORS = (1.0, 1.0, 2.0, 2.0, 1.0)
"""The setting changes before the third step, and back before the fifth."""
_MISSING = object()
Change = Callable[[Any], object]


class Run(ExitStack):
    """One run of a kind: the factor of each step, and callbacks that restore globals and flags when the run ends."""

    def __init__(self, factors: Sequence[float], by_loss: bool = False) -> None:
        super().__init__()
        self.factors, self.by_loss = tuple(factors), by_loss

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the run ends."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.callback(delattr, owner, name) if before is _MISSING else self.callback(setattr, owner, name, before)

    def set_item(self, table: Any, key: Any, value: Any) -> None:
        """Set a table's value for a key until the run ends."""
        before = table.get(key, _MISSING)
        table[key] = value
        self.callback(table.pop, key) if before is _MISSING else self.callback(operator.setitem, table, key, before)


def random_batch(step: int) -> tuple[Any, ...]:
    """Return inputs and targets of a step."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4, n, generator=generator, dtype=torch.float32) for n in (4, 3))


@dataclass(frozen=True)
class Case:
    """A training: its model, and the function that changes a setting to a factor.

    The default optimizer is SGD; a case with `trains=False` has no optimizer and computes losses. `around` returns a
    context manager for each step. `owner` has the setting if the loss reads it; else the model has it.
    """

    model: Any
    change: Change
    loss: Callable[..., Tensor] = F.mse_loss
    optimizer: Optimizer | None = None
    trains: bool = True
    batch: Callable[[int], tuple[Any, ...]] = random_batch
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    strategy: mw.Strategy | None = None
    owner: Any = None

    @property
    def read_from(self) -> Any:
        """Return the object whose attributes the training reads."""
        return self.model if self.owner is None else self.owner

    @property
    def trained_by(self) -> Optimizer | None:
        """Return the optimizer of the training."""
        if not self.trains:
            return None
        return sgd(self.model) if self.optimizer is None else self.optimizer


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


class Net(nn.Module):
    """Two linear layers; values between them are multiplied by `scale()`. Keywords become attributes."""

    if TYPE_CHECKING:  # attributes of any type
        a: Any
        b: Any

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        for name, value in attributes.items():
            setattr(self, name, value)

    def scale(self) -> Any:
        return 1.0

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


class Holder:
    """A user-defined object that a loss reads. Keywords become attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def reads(run: Run, scale: Callable[[Any], Any], change: Change, **attributes: Any) -> Case:
    """Return a training that multiplies by `scale(owner)`, where these attributes of the owner lead to the setting.

    The owner is the model, and `scale` its method. In runs with `by_loss` the owner is an object that the loss reads.
    """
    if not run.by_loss:
        return Case(type("Model", (Net,), {"scale": scale})(**attributes), change)
    holder = Holder(**attributes)
    return Case(Net(), change, loss=lambda out, y: F.mse_loss(out, y) * scale(holder), owner=holder)


def replaces(run: Run, scale: Callable[[Any], Any], name: str, value_of: Callable[[float], Any]) -> Case:
    """Return a training whose `scale` reads an attribute, which the change replaces with `value_of(factor)`."""
    case = reads(run, scale, lambda factor: setattr(case.read_from, name, value_of(factor)), **{name: value_of(1.0)})
    return case


def calls(between: Callable[[Any, Tensor], Tensor], change: Change, **attributes: Any) -> Case:
    """Return a training whose model has the method `between`, called between its layers, and these attributes."""
    model = type("Model", (Net,), {"between": between})
    return Case(model(**attributes), change)


def constant(factor: float) -> Callable[..., float]:
    """Return a function that returns the factor."""
    return lambda *args: factor


def attribute(owner: Any, name: str) -> Change:
    """Return the change that sets an attribute to the factor."""
    return partial(setattr, owner, name)


def item(table: Any, key: Any) -> Change:
    """Return the change that sets a table's value for a key to the factor."""
    return partial(operator.setitem, table, key)


def switch(off: Any, on: Any, put: Callable[[Any], object]) -> Change:
    """Return the change that puts `off` if the factor is 1, else `on`."""
    return lambda factor: put(off if factor == 1 else on)


def sets(owner: Any, name: str, off: Any, on: Any) -> Change:
    """Return the change that sets an attribute to `off` if the factor is 1, else to `on`."""
    return switch(off, on, lambda value: setattr(owner, name, value))


@dataclass(frozen=True)
class Kind:
    """A kind of change, by name; `on_mesh` kinds also run on two ranks whose batch is sharded."""

    name: str
    theme: str
    build: Callable[[Run], Case]
    on_mesh: bool = False
    by_loss: bool = False


ADDED: dict[str, Kind] = {}
"""All kinds of the files that are imported, in order; `_stale_kinds` imports every file."""


def kind(build: Callable[[Run], Case]) -> Callable[[Run], Case]:
    """Add a kind to the table."""
    _add(Kind(_name_of(build), _theme_of(build), build))
    return build


def kind_on_mesh(build: Callable[[Run], Case]) -> Callable[[Run], Case]:
    """Add a kind that also runs on two ranks: its change concerns objects of one rank only."""
    _add(Kind(_name_of(build), _theme_of(build), build, on_mesh=True))
    return build


def by_loss_too(build: Callable[[Run], Case]) -> Callable[[Run], Case]:
    """Add the same kind with a loss that reads the setting, instead of the model."""
    _add(Kind(f"{_name_of(build)}, read by the loss", _theme_of(build), build, by_loss=True))
    return build


def _add(added: Kind) -> None:
    if added.name in ADDED:
        raise KeyError(f"two kinds are called {added.name!r}")
    ADDED[added.name] = added


def _name_of(build: Callable[[Run], Case]) -> str:
    return build.__name__.replace("_", " ")


def _theme_of(build: Callable[[Run], Case]) -> str:
    return build.__module__.rpartition("_stale_")[2]
