"""Programs as kernels: changing numbers are tensors in them, and every optimizer steps as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Program
from meshwright.graph.execution import matrix_products
from meshwright.graph.execution.kernel_regions import DOUBLES, WITH_TENSORS, regions
from meshwright.graph.execution.scatter_options import options_for

aten = torch.ops.aten

Made = tuple[list[float], list[Tensor]]


def trained(make: Callable[[Any], torch.optim.Optimizer], strategy: mw.Strategy | None) -> Made:
    """Return the losses of a few steps under a schedule, and all trained tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step = None if strategy is None else mw.to_static(model, None, F.cross_entropy, optimizer, strategy)
    losses: list[float] = []
    for n in range(4):
        generator = torch.Generator().manual_seed(n)
        x, y = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        if step is None:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = step(x, y)
        losses.append(loss.item())
        schedule.step()
    return losses, [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_update_as_the_optimizer_does(name: str) -> None:
    make = OPTIMIZERS[name]
    losses, state = mw.simulate(lambda: trained(make, mw.Strategy(compiler="inductor")), 1)[0]
    expected, wanted = trained(make, None)
    assert losses == pytest.approx(expected, rel=1e-5)
    for a, b in zip(state, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_numbers_stay_outside_of_kernels(name: str) -> None:
    def look() -> tuple[int, list[str]]:
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = OPTIMIZERS[name](model.parameters())
        step = mw.to_static(model, None, F.mse_loss, optimizer, mw.Strategy(foreach=False, inplace=False))
        for _ in range(2):  # the first step makes states
            step(torch.randn(3, 4), torch.randn(3, 4))
        parts = regions(step.program, {})
        return len(parts.numbers), [str(n.op) for n in parts.behind]

    numbers, behind = mw.simulate(look, 1)[0]
    assert numbers > 0
    assert behind == []


SCALARS = (0.3, -1.7, 2.0)


@pytest.mark.parametrize("op", WITH_TENSORS, ids=str)
@pytest.mark.parametrize("number", SCALARS)
def test_an_operator_with_tensors_for_numbers_gives_the_same(op: Any, number: float) -> None:
    torch.manual_seed(1)
    x, y, z = (torch.rand(5) + 0.5 for _ in range(3))
    args, kwargs = _arguments(op, x, y, z, number)
    wanted = op(*args, **kwargs)
    double = torch.tensor(number, dtype=torch.float64)
    given = [double if a is number else a for a in args]
    named = {key: double if a is number else a for key, a in kwargs.items()}
    found = WITH_TENSORS[op](*given, **named, dtype=wanted.dtype)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def _arguments(op: Any, x: Tensor, y: Tensor, z: Tensor, number: float) -> tuple[list[Any], dict[str, Any]]:
    if op in (aten.addcmul.default, aten.addcdiv.default):
        return [x, y, z], {"value": number}
    if op is aten.lerp.Scalar:
        return [x, y, number], {}
    if op in (aten.add.Tensor, aten.sub.Tensor):
        return [x, y], {"alpha": number}
    if op is aten.pow.Scalar:
        return [abs(number), x], {}
    return [x, number], {}


ON_DOUBLES = [f for f in DOUBLES if f is not aten._local_scalar_dense.default]


@pytest.mark.parametrize("function", ON_DOUBLES, ids=lambda f: f.__name__)
def test_a_function_on_doubles_gives_the_number(function: Any) -> None:
    names = getattr(function, "__name__", "")
    numbers = (1.7, 0.6) if names in ("add", "mul", "pow", "truediv", "minimum", "maximum") else (0.6,)
    doubles = [torch.tensor(n, dtype=torch.float64) for n in numbers]
    found = DOUBLES[function](*doubles)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(function(*numbers)), rel=1e-15)


@pytest.mark.parametrize("shapes", [((300, 300), (300, 200)), ((8, 8), (8, 8))])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
def test_matrices_are_multiplied_right_by_either_library(
    shapes: Any, turned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    a, b = (torch.randn(s).t().contiguous().t() if t else torch.randn(s) for s, t in zip(shapes, turned, strict=True))
    for by_onednn in (False, True):
        monkeypatch.setattr(matrix_products, "by_onednn", lambda chosen=by_onednn: chosen)
        torch.testing.assert_close(matrix_products.matmul(a, b), a @ b, rtol=1e-4, atol=1e-4)


class Relative(nn.Module):
    """A bias by distance, as in T5: the gradient is added at computed indices."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[-1])
        bias = self.bias((n[None] - n[:, None] + 4).clamp(0, 8)).permute(2, 0, 1)
        return (bias * x).softmax(-1)


def test_additions_at_computed_indices_are_right() -> None:
    def rank(compiler: str) -> Tensor:
        torch.manual_seed(0)
        model, mesh = Relative(), mw.ProcessMesh([0, 1], ["dp"])
        mw.shard_layer(model, mesh)
        strategy = mw.Strategy(compiler=compiler)
        step = mw.to_static(model, None, F.mse_loss, torch.optim.SGD(model.parameters(), lr=1.0), strategy)
        step(*(mw.shard_tensor(torch.randn(4, 2, 5, 5), mesh, [mw.Shard(0)]) for _ in range(2)))
        return mw.unshard_dtensor(model.bias.weight).detach()

    expected, found = (mw.simulate(lambda c=compiler: rank(c), 2) for compiler in ("none", "inductor"))
    torch.testing.assert_close(found, expected)


def test_only_computed_indices_need_plain_tensors() -> None:
    def made(model: nn.Module, x: Tensor, y: Tensor) -> Program:
        step = mw.to_static(model, None, F.mse_loss, torch.optim.SGD(model.parameters(), lr=1.0))
        step(x, y)
        return step.program

    def rank() -> list[bool]:
        words = made(nn.Embedding(9, 2), torch.randint(9, (4, 5)), torch.randn(4, 5, 2))
        bias = made(Relative(), torch.randn(4, 2, 5, 5), torch.randn(4, 2, 5, 5))
        return [bool(options_for(program)) for program in (words, bias)]

    assert mw.simulate(rank, 1) == [[False, True]]


LIBRARY = torch.library.Library("kernel_regions", "FRAGMENT")
LIBRARY.define("halves(Tensor x) -> (Tensor, SymInt)")
LIBRARY.impl("halves", lambda x: (x / 2, x.shape[0]), "CompositeExplicitAutograd")


class WithNumber(nn.Module):
    """A result between two layers has a number beside it, as fused attention on CUDA has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = torch.ops.kernel_regions.halves(self.first(x))
        return self.last(y).sin()


def test_a_number_that_nothing_reads_does_not_end_the_kernels() -> None:
    model = WithNumber().requires_grad_(False)
    x = torch.randn(3, 4)

    def run() -> tuple[Tensor, int]:
        step = mw.to_static(model).eval()
        return step(x), len(regions(step.program, {}).behind)

    out, behind = mw.simulate(run, 1)[0]
    torch.testing.assert_close(out, model(x))
    assert behind == 0
