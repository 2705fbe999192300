"""What was switched between two calls of a static model is seen: hooks too, and other hooks in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import CaptureError

Step = Callable[[Tensor, Tensor], Tensor]


def story(static: bool) -> Iterator[float]:
    """The losses of steps between which hooks come and go."""
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


def test_hooks_that_come_and_go_count() -> None:
    static, eager = (mw.simulate(lambda s=s: list(story(s)), 1)[0] for s in (True, False))
    assert static == pytest.approx(eager, rel=1e-6)


FACTOR: Any = 1.0
"""What functions here read as a global."""


class Scaled:
    """A loss with a setting of its own, and a method that is one too."""

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
def test_what_functions_read_from_around_them_counts(where: str, layer: type[nn.Linear]) -> None:
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
