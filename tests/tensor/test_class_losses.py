"""Losses over sharded classes: values, gradients and collectives, beside one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator

LINE = mw.ProcessMesh([0, 1, 2, 3], ["tp"])
SQUARE = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
ROWS, CLASSES = 6, 7
"""Rows are uneven on two ranks of four, and classes on all."""
LAYOUTS = {
    "classes": (LINE, [mw.Shard(1)]),
    "classes on two axes": (SQUARE, [mw.Shard(1), mw.Shard(1)]),
    "rows and classes": (SQUARE, [mw.Shard(0), mw.Shard(1)]),
}
ROW_VALUES = {
    "usual": [],
    "one class only": [-inf, -inf, -inf, 2.0, -inf, -inf, -inf],
    "a shard without classes": [1.0, 0.5, -inf, -inf, 3.0, -1.0, 0.0],
    "no class": [-inf] * CLASSES,
    "infinite": [1.0, inf, 0.0, 2.0, 1.0, 0.0, -1.0],
    "not a number": [1.0, nan, 0.0, 2.0, 1.0, 0.0, -1.0],
    "far from zero": [1e4, 1e4 + 1, 1e4 - 2, 1e4, 1e4 + 3, 1e4, 1e4],
}
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Loss:
    """Arguments of a cross entropy; `target` is "indices", "probabilities", or "ignored": only ignored indices."""

    reduction: str
    target: str = "indices"
    weighted: bool = False
    smoothing: float = 0.0

    def given(self, classes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits, targets and weights."""
        g = torch.Generator().manual_seed(1)
        x = torch.randn(ROWS, classes, generator=g, dtype=torch.float64).to(dtype)
        target = torch.randint(classes, (ROWS,), generator=g)
        target[2] = -100
        if self.target == "ignored":
            target.fill_(-100)
        if self.target == "probabilities":
            target = torch.rand(ROWS, classes, generator=g).softmax(-1).to(dtype)
        weight = torch.rand(classes, generator=g).to(dtype) + 0.5 if self.weighted else None
        return x, target, weight

    def __call__(self, x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        return F.cross_entropy(x, target, weight, reduction=self.reduction, label_smoothing=self.smoothing)


LOSSES = [
    Loss(*parts)
    for parts in itertools.product(REDUCTIONS, ("indices", "probabilities", "ignored"), (False, True), (0.0, 0.1))
]
Results = tuple[Tensor, Tensor]


def results(loss: Callable[[Tensor], Tensor], x: Tensor) -> Results:
    """Return the loss, and the gradient of its weighted sum."""
    out = loss(x)
    (out * torch.arange(1.0, 1 + out.numel()).view(out.shape)).sum().backward()
    assert x.grad is not None
    return mw.unshard_dtensor(out.detach()), mw.unshard_dtensor(x.grad)


def check(cases: list[tuple[Loss, Tensor, Tensor, Tensor | None]], layout: str, **tolerance: float) -> None:
    """Compare all cases with one device, on four simulated ranks."""
    mesh, places = LAYOUTS[layout]

    def sharded() -> list[Results]:
        def one(loss: Loss, x: Tensor, target: Tensor, weight: Tensor | None) -> Results:
            logits = mw.shard_tensor(x.clone().requires_grad_(), mesh, places)
            return results(lambda logits: loss(logits, target, weight), logits)

        return [one(*case) for case in cases]

    for found in mw.simulate(sharded, 4):
        for (loss, x, target, weight), got in zip(cases, found, strict=True):
            goal = results(lambda x, a=(loss, target, weight): a[0](x, *a[1:]), x.clone().requires_grad_())
            for name, mine, other in zip(("value", "gradient"), got, goal, strict=True):
                torch.testing.assert_close(
                    mine, other, equal_nan=True, msg=lambda text, n=name, a=loss: f"{n} of {a}: {text}", **tolerance
                )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("classes", [CLASSES, 8, 3], ids=["uneven", "even", "a rank without classes"])
def test_values_and_gradients_equal_those_of_one_device(layout: str, classes: int) -> None:
    check([(loss, *loss.given(classes)) for loss in LOSSES], layout)


@pytest.mark.parametrize("values", ROW_VALUES)
def test_extreme_logits_give_the_results_of_one_device(values: str) -> None:
    """The largest logit of a rank may be -inf although the row has others."""

    def cases() -> Iterator[tuple[Loss, Tensor, Tensor, Tensor | None]]:
        for loss in LOSSES:
            x, target, weight = loss.given(CLASSES)
            if ROW_VALUES[values]:
                x[1] = torch.tensor(ROW_VALUES[values])
            yield loss, x, target, weight

    check(list(cases()), "classes", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Half precision is computed in float32, so the results are those of one device up to their last bits."""
    cases = [(loss, *loss.given(CLASSES, dtype)) for loss in LOSSES]
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 3e-2, "atol": 2e-2}
    check(cases, "classes", **close)


@pytest.mark.parametrize("shape", [(CLASSES,), (3, CLASSES, 2), (2, CLASSES, 2, 2), (0, CLASSES)], ids=str)
def test_logits_of_other_dims(shape: tuple[int, ...]) -> None:
    """Classes are dim 1, or dim 0 without a batch."""
    c = min(len(shape) - 1, 1)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    target = torch.randint(CLASSES, [n for d, n in enumerate(shape) if d != c], generator=g)

    def sharded() -> list[Results]:
        return [
            results(
                lambda x, a=loss: a(x, target, None),
                mw.shard_tensor(x.clone().requires_grad_(), LINE, [mw.Shard(c)]),
            )
            for loss in losses
        ]

    losses = [Loss(how) for how in REDUCTIONS]
    for loss, found in zip(losses, mw.simulate(sharded, 4)[1], strict=True):
        goal = results(lambda x, a=loss: a(x, target, None), x.clone().requires_grad_())
        torch.testing.assert_close(found, goal, equal_nan=True)


def calls_of(run: Callable[[Tensor, Tensor], Tensor], backward: bool = True) -> dict[str, int]:
    """Return the calls by kind of rank 0 of 4; classes are sharded."""
    with using_communicator(PeerlessCommunicator(0, 4)) as here:
        x = mw.shard_tensor(torch.randn(ROWS, 8).requires_grad_(), LINE, [mw.Shard(1)])
        loss = run(x, torch.zeros(ROWS, dtype=torch.long))
        if backward:
            loss.sum().backward()
        loss.tolist()
        return dict(here.seen.calls)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_cross_entropy_makes_one_exchange(loss: Loss) -> None:
    _, target, weight = loss.given(8)
    assert calls_of(lambda x, _: loss(x, target, weight)) == {"all_gather": 1}


def test_the_number_of_targets_takes_no_exchange() -> None:
    """All ranks have all targets, so they only sum the picked log-probabilities."""
    assert calls_of(F.nll_loss) == {"all_reduce": 1}


def test_second_derivatives_equal_those_of_one_device() -> None:
    x, target, _ = Loss("mean").given(CLASSES, torch.float64)

    def curvature(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(F.cross_entropy(x, target), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        return mw.unshard_dtensor(second)

    goal = curvature(x.clone().requires_grad_())
    for found in mw.simulate(lambda: curvature(mw.shard_tensor(x.clone().requires_grad_(), LINE, [mw.Shard(1)])), 4):
        torch.testing.assert_close(found, goal)


class Classifier(nn.Module):
    """A linear layer, and one of the losses; classes are sharded over `mesh`."""

    def __init__(self, loss: Loss, mesh: mw.ProcessMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        _, self.target, self.weight = loss.given(CLASSES)
        self.head = nn.Linear(CLASSES, CLASSES)
        self.loss = loss
        if mesh is not None:
            self.head.weight = mw.shard_tensor(self.head.weight, mesh, [mw.Shard(0)])
            self.head.bias = mw.shard_tensor(self.head.bias, mesh, [mw.Shard(0)])

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(x), self.target, self.weight).mean()


@pytest.mark.parametrize(
    "loss", [Loss("mean"), Loss("none", "probabilities", True, 0.1), Loss("sum", weighted=True)], ids=str
)
def test_a_static_step_makes_one_exchange(loss: Loss) -> None:
    x, *_ = loss.given(CLASSES)

    def on_one_device() -> list[float]:
        model = Classifier(loss, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            out = model(x)
            out.backward()
            optimizer.step()
            found.append(out.item())
        return found

    def static() -> tuple[list[float], str]:
        model = Classifier(loss, LINE)
        step = mw.to_static(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        return [step(x).item() for _ in range(3)], step.program.text()

    goal = on_one_device()
    for found, text in mw.simulate(static, 4):
        assert found == pytest.approx(goal, rel=1e-5)
        assert text.count("AllGather") == 1
        assert "AllReduce" not in text
