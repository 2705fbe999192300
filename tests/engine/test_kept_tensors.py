"""Forward passes that keep tensors in attributes, lists and dicts, and read them again in the same pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import SideEffectError


class Balanced(nn.Module):
    """A layer that keeps its auxiliary loss, and one for a log that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh()
        self.balance, self.largest = x.square().mean(), x.detach().amax()
        return x

    def get_balance(self) -> Tensor:
        return self.balance


class Collector(nn.Module):
    """A model that sums what its layers keep, and collects their results in a new list and in one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.seen = nn.ModuleList(Balanced() for _ in range(2)), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.results = list[Tensor]()
        for at, layer in enumerate(self.layers):
            x = layer(x)
            self.results.append(x)
            self.seen[at] = x
        kept = torch.stack([layer.get_balance() for layer in self.layers if isinstance(layer, Balanced)]).sum()
        return x.square().sum() + kept + torch.stack(self.results).mean() + self.seen[0].mean()


def trained(stages: int) -> tuple[list[Tensor], nn.Module]:
    """Return the parameters after three steps, the last one with another number of rows; and the model."""
    torch.manual_seed(0)
    model: Any = Collector()
    if stages:
        mw.split_pipeline(model, mw.ProcessMesh(range(stages), ["pp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = mw.Strategy.of(pipeline={"enable": True, "schedule_mode": "1F1B"} if stages > 1 else {})
    step = mw.to_static(model, None, None, optimizer, strategy) if stages else None
    for rows in (2, 2, 4):
        x = torch.ones(rows, 4)
        if step is not None:
            step(x)
            continue
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [mw.unshard_dtensor(p.detach()) for p in model.parameters()], model


@pytest.mark.parametrize("stages", [1, 2])
def test_tensors_kept_within_a_pass_are_values_of_the_program(stages: int) -> None:
    for found, _ in mw.simulate(lambda: trained(stages), stages):
        torch.testing.assert_close(found, trained(0)[0], rtol=1e-5, atol=1e-6)


def test_kept_tensors_cannot_be_used_after_the_step() -> None:
    (_, model), *_ = mw.simulate(lambda: trained(1), 1)
    layer: Any = model.get_submodule("layers.1")
    for x in (layer.balance, layer.largest, model.results[0], model.seen[1]):  # pyright: ignore
        assert repr(x).startswith("a tensor that a forward pass left in ")
        for use in (float, torch.detach, lambda x: x + 1, lambda x: x.shape):
            with pytest.raises(SideEffectError, match="to a buffer"):
                use(x)


class Recurrent(nn.Module):
    """A model that reads in some way what its earlier call kept."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way
        self.kept: Any = None
        self.history = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "value" and self.kept is not None:
            x = x + self.kept
        if self.way == "shape" and self.kept is not None:
            x = x * self.kept.shape[0]
        if self.way == "class" and isinstance(self.kept, Tensor):
            x = x * 2
        x = self.inner(x)
        self.kept = x.detach() if self.way != "turns" or self.kept is None else None
        if self.way == "list":
            self.history.append(x.detach())
        return x.square().sum() * (1 + len(self.history))


@pytest.mark.parametrize("way", ["value", "shape", "class", "turns", "list"])
def test_tensors_kept_for_the_next_pass_are_refused(way: str) -> None:
    model = Recurrent(way)
    step = mw.to_static(model, None, None, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SideEffectError):
        mw.simulate(lambda: step(torch.ones(2, 4)), 1)
    assert model.kept is None
    assert not model.history
