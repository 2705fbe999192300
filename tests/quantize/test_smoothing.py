"""AWQ and SmoothQuant: smaller errors than rounding alone, the same function, and equal numbers on every mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.quantize import Scheme

from .models import INT4, differences, state_of

CONFIG = LlamaConfig(vocab=32, hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=48)
AWQ, SMOOTHQUANT = Scheme(INT4, method="awq"), Scheme.preset("w8a8-smoothquant")


def llama() -> Llama:
    """Return a model whose norms make some features much larger than others."""
    model = Llama(CONFIG)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p[::7] *= 20
    return model


def texts() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, CONFIG.vocab, (3, 2, 2, 8), generator=torch.Generator().manual_seed(3))
    return [(x[0], x[1]) for x in tokens]


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 3, 1), (2, 1, 2)])
def test_norms_and_codes_on_a_mesh_are_those_of_one_device(shape: tuple[int, ...]) -> None:
    ones = [mw.quantize(llama(), scheme, texts()) for scheme in (AWQ, SMOOTHQUANT)]
    assert not torch.equal(
        ones[0].get_parameter("blocks.0.attention_norm.weight"),
        llama().blocks[0].get_parameter("attention_norm.weight"),
    )

    def program() -> list[list[str]]:
        found: list[list[str]] = []
        for one, scheme in zip(ones, (AWQ, SMOOTHQUANT), strict=True):
            model = llama()
            mark(model, mw.ProcessMesh(np.arange(np.prod(shape)).reshape(shape), ["pp", "dp", "tp"]))
            found.append(differences(state_of(one), state_of(mw.quantize(model, scheme, texts()))))
        return found

    assert mw.simulate(program, int(np.prod(shape))) == [[[], []]] * int(np.prod(shape))


class Normed(nn.Module):
    """Two layers behind one norm, with large outliers in two features. With `branch`, a third reader of the norm."""

    def __init__(self, norm: nn.Module, branch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.branch = norm, branch
        self.one, self.other = nn.Linear(64, 48), nn.Linear(64, 48)
        with torch.no_grad():
            norm.get_parameter("weight")[::32] *= 100

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = torch.cat([self.one(x), self.other(x)], -1)
        return y + x.square().sum(-1, keepdim=True) if self.branch else y


@torch.no_grad()
def error(model: nn.Module, exact: nn.Module) -> float:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    return float((model(x) - exact(x)).norm() / exact(x).norm())


def inputs() -> list[Tensor]:
    return [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_errors_are_smaller_than_those_of_rounding_alone(norm: type[nn.Module]) -> None:
    def made() -> nn.Module:
        return Normed(norm(64))

    nearest = error(mw.quantize(made(), Scheme(INT4)), made())
    assert error(mw.quantize(made(), AWQ, inputs()), made()) < 0.95 * nearest
    dynamic = error(mw.quantize(made(), "int8-dynamic"), made())
    assert error(mw.quantize(made(), SMOOTHQUANT, inputs()), made()) < 0.6 * dynamic


class Shifted(nn.Module):
    """A norm whose factor is 1 + weight, as in Gemma: its weight cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (64,)) * (1 + self.weight)


@pytest.mark.parametrize("make", [lambda: Normed(nn.RMSNorm(64), branch=True), lambda: Normed(Shifted())])
def test_a_norm_that_cannot_be_divided_stays(make: Any) -> None:
    model = mw.quantize(make(), AWQ, inputs())
    assert torch.equal(model.get_parameter("norm.weight"), make().norm.weight)
    assert (
        differences(
            {n: x for n, x in state_of(model).items() if n.startswith("one.")},
            {n: x for n, x in state_of(mw.quantize(make(), Scheme(INT4))).items() if n.startswith("one.")},
        )
        == []
    )


class Sometimes(nn.Module):
    """A block whose norm has a second reader for some inputs only: for these, its weight cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = nn.RMSNorm(64), nn.Linear(64, 64)
        with torch.no_grad():
            self.norm.weight[::32] *= 100

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.layer(y) + y * (x.sum() > 0)


def test_a_norm_is_divided_on_a_mesh_where_one_device_divides_it() -> None:
    batches = [x - x.mean() + sign for x, sign in zip(inputs(), (-1, -1, 1, 1), strict=True)]
    one = mw.quantize(Sometimes(), SMOOTHQUANT, batches)
    assert not torch.equal(one.get_parameter("norm.weight"), Sometimes().norm.weight)

    def program() -> list[str]:
        model = mw.shard_layer(Sometimes(), mw.ProcessMesh([0, 1], ["dp"]))
        return differences(state_of(one), state_of(mw.quantize(model, SMOOTHQUANT, batches)))

    assert mw.simulate(program, 2) == [[], []]


class Gated(nn.Module):
    """A gated layer. The last layer can be smoothed by the rows of `up`, but not by those of `gate`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))
        with torch.no_grad():
            self.up.weight[::32] *= 100

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_awq_divides_the_rows_of_the_layer_that_makes_the_inputs() -> None:
    model: Any = mw.quantize(Gated(), AWQ, inputs())
    exact = Gated()
    gate = model.gate.dequantized().norm(dim=1) / exact.gate.weight.norm(dim=1)
    up = model.up.dequantized().norm(dim=1) / exact.up.weight.norm(dim=1)
    down = model.down.dequantized().norm(dim=0) / exact.down.weight.norm(dim=0)
    assert (gate - 1).abs().max() < 0.1
    assert (up - 1).abs().max() > 0.5
    assert (up * down - 1).abs().max() < 0.2
