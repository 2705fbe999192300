"""Losses that are the mean of their pieces' losses are recognised by rules; other losses are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.graph import capture
from meshwright.search import check_accumulation

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def net(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Linear(8, 6))


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)


def balanced(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return an auxiliary loss as of experts: a product of means."""
    out = m(x).softmax(-1)
    return F.mse_loss(out, y) + (out.mean(0) * out.square().mean(0)).sum()


def written(x: Tensor) -> Tensor:
    """Return values as attention joins its heads: an empty tensor whose parts are written."""
    out = x.new_empty(x.shape)
    out[:, :2], out[:, 2:] = x[:, 4:], x[:, :4]
    return out


EVEN: dict[str, tuple[nn.Module, Loss]] = {
    "mse": (net(nn.ReLU()), lambda m, x, y: F.mse_loss(m(x), y)),
    "mean": (net(nn.LayerNorm(8)), lambda m, x, y: (m(x) - y).square().mean()),
    "half of it": (net(nn.GELU()), lambda m, x, y: 0.5 * F.l1_loss(m(x), y)),
    "two of them": (net(nn.GELU()), lambda m, x, y: F.l1_loss(m(x), y) + 0.1 * m(x).mean()),
    "reshaped": (net(nn.SiLU()), lambda m, x, y: F.mse_loss(m(x).unflatten(1, (2, 3)).flatten(), y.flatten())),
    "written into": (net(nn.SiLU()), lambda m, x, y: F.mse_loss(written(m(x)), y)),
    "classes": (net(nn.Tanh()), lambda m, x, y: F.cross_entropy(m(x), y.argmax(1) if y.is_floating_point() else y)),
}
UNEVEN: dict[str, tuple[nn.Module, Loss]] = {
    "a sum": (net(nn.ReLU()), lambda m, x, y: F.mse_loss(m(x), y, reduction="sum")),
    "batch norm": (net(nn.BatchNorm1d(8)), lambda m, x, y: F.mse_loss(m(x), y)),
    "a product of means": (net(nn.ReLU()), balanced),
    "a square of a mean": (net(nn.ReLU()), lambda m, x, y: F.mse_loss(m(x), y).square()),
    "a softmax over rows": (net(nn.ReLU()), lambda m, x, y: F.mse_loss(m(x).softmax(0), y)),
    "rows beside others": (net(nn.ReLU()), lambda m, x, y: F.mse_loss(m(x).roll(1, 0), y)),
    "a running sum": (net(nn.ReLU()), lambda m, x, y: F.mse_loss(m(x).cumsum(0), y)),
    "weights by class": (net(nn.ReLU()), lambda m, x, y: F.cross_entropy(m(x), y.softmax(1), torch.arange(1.0, 7.0))),
}


def found(case: tuple[nn.Module, Loss], batch: tuple[Any, ...]) -> Any:
    model, loss = case
    return check_accumulation(capture(model, lambda *given: loss(model, *given), batch).program)


@pytest.mark.parametrize("name", [n for n in EVEN if n != "classes"])
def test_pieces_have_the_mean_that_the_batch_has(name: str) -> None:
    model, loss = EVEN[name]
    told = found(EVEN[name], rows())
    assert told.why_not == ""
    assert not told.ignores(rows())
    parts = [loss(model, *part) for part in zip(*(t.chunk(4) for t in rows()), strict=True)]
    torch.testing.assert_close(sum(parts) / 4, loss(model, *rows()))


@pytest.mark.parametrize("name", UNEVEN)
def test_other_losses_are_not_recognised(name: str) -> None:
    assert found(UNEVEN[name], rows()).why_not


def test_losses_of_labels_are_recognised_if_none_is_ignored() -> None:
    x, labels = rows()[0], torch.arange(8) % 6
    told = found(EVEN["classes"], (x, labels))
    assert told.labels == ((1, -100),)
    assert not told.ignores((x, labels))
    assert told.ignores((x, labels.masked_fill(labels == 3, -100)))
    assert not told.ignores((x, labels.to("meta")))


def test_computed_labels_are_not_recognised() -> None:
    assert found(EVEN["classes"], rows()).why_not


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_dropout_inside_attention_is_recognised(drop: float) -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        heads = m(x).unflatten(1, (1, 6, 1))
        return F.mse_loss(F.scaled_dot_product_attention(heads, heads, heads, dropout_p=drop).flatten(1), y)

    assert found((net(nn.ReLU()), loss), rows()).draws == (drop > 0)
