"""Optimizers with their options, and parameters with their gradients in layouts that differ.

Options come from the signature of each class of `torch.optim`. A `Setting` makes parameters and gives them gradients.
On one device its layouts are ignored, so the same code computes the expected values.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw

# --- options ---------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS: tuple[dict[str, Any], ...] = (
    {}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True},
    {"foreach": True, "capturable": True}, {"differentiable": True},
)  # fmt: skip
CHOICES: dict[str, Any] = {
    "amsgrad": True, "maximize": True, "centered": True, "decoupled_weight_decay": True, "nesterov": True,
    "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.5,
    "line_search_fn": "strong_wolfe", "adjust_lr_fn": "match_rms_adamw", "t0": 1.0, "history_size": 2,
}  # fmt: skip


def classes() -> list[type[torch.optim.Optimizer]]:
    """Return every optimizer class of `torch.optim`."""
    found = [k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)]
    return sorted((k for k in found if k is not torch.optim.Optimizer), key=lambda k: k.__name__)


def options_of(kind: type) -> list[dict[str, Any]]:
    """Return every implementation with no choice, with each choice, and with all choices that are allowed together."""
    names = set(inspect.signature(kind).parameters)
    choices = {k: v for k, v in CHOICES.items() if k in names}
    sets = [{}, *({k: v} for k, v in choices.items()), choices]
    if "nesterov" in names and "momentum" in names:
        sets.append(
            {"nesterov": True, "momentum": 0.9, "dampening": 0.0} if "dampening" in names else {"momentum": 0.5}
        )
    sets.append({"lr": torch.tensor(0.05)})
    found: list[dict[str, Any]] = []
    for how, chosen in itertools.product(IMPLEMENTATIONS, sets):
        options = {**({"lr": 0.05} if "lr" in names and _default(kind, "lr") < 0.5 else {}), **chosen, **how}
        if set(options) <= names and options not in found:
            found.append(options)
    return found


def _default(kind: type, name: str) -> Any:
    return inspect.signature(kind).parameters[name].default


# --- parameters and gradients ----------------------------------------------------------------------------------------

Marks = Sequence[Any]
S0, S1, S2, R = mw.Shard(0), mw.Shard(1), mw.Shard(2), mw.Replicate()


class Layer:
    """A function that distributes tensors on a mesh, or leaves them as they are on one device."""

    def __init__(self, mesh: Sequence[int] | None) -> None:
        self.on = None if mesh is None else mw.ProcessMesh(torch.arange(4).reshape(*mesh).tolist(), ["x", "y"])

    def shard(self, x: Tensor, *marks: Any) -> Tensor:
        if self.on is None:
            return x.clone()  # parameters share no memory
        return mw.shard_tensor(x, self.on, list(marks))

    def terms(self, x: Tensor) -> Tensor:
        """Return `x` as a pending sum over all axes."""
        if self.on is None:
            return x
        from meshwright.comm import current_communicator

        weight = torch.tensor([0.5, 0.25, -1.0, 1.25])[current_communicator().rank]
        return mw.dtensor_from_local(x * weight, self.on, [mw.Partial(), mw.Partial()])


@dataclass(frozen=True)
class Setting:
    """Parameters on a mesh, and the function that gives them gradients before each step."""

    name: str
    mesh: tuple[int, int]
    make: Callable[[Layer], list[Tensor]]
    grade: Callable[[Layer, Sequence[Tensor], int], Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers in double precision: with less, LBFGS and second derivatives multiply rounding errors."""
    generator = torch.Generator().manual_seed(seed + 17 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def by_loss(layer: Layer, params: Sequence[Tensor], step: int) -> Any:
    """Give the parameters gradients of a convex loss with data sharded along its first dim."""
    loss: Any = 0.0
    for k, p in enumerate(params):
        data = layer.shard(numbers(4, p.numel(), seed=step + k).abs() + 0.1, S0, R)
        loss = loss + (data * (p.reshape(-1) - 0.1 * (step + 1)) ** 2).mean()
    loss.backward()
    return loss


def by_hand(*marks: Any) -> Callable[[Layer, Sequence[Tensor], int], Any]:
    """Return a function that sets gradients of a distance in the layout of `marks`, or as "plain" or "partial"."""

    def grade(layer: Layer, params: Sequence[Tensor], step: int) -> Any:
        loss: Any = 0.0
        for k, p in enumerate(params):
            grad = mw.unshard_dtensor(p).detach() - numbers(*p.shape, seed=step + k)
            p.grad = _laid(layer, grad, marks)
            loss = loss + 0.5 * (grad**2).sum()
        return loss

    return grade


def _laid(layer: Layer, x: Tensor, marks: Sequence[Any]) -> Tensor:
    if marks == ("plain",):
        return x
    if marks == ("partial",):
        return layer.terms(x)
    return layer.shard(x, *[m if not isinstance(m, mw.Shard) or m.dim < x.dim() else R for m in marks])


def parameters(*marks: Any) -> Callable[[Layer], list[Tensor]]:
    """Return a function that makes matrices in one layout."""
    return lambda layer: [nn.Parameter(layer.shard(numbers(n, m), *marks)) for n, m in ((5, 6), (8, 3), (2, 4))]


def different(layer: Layer) -> list[Tensor]:
    marks = ((S0, S1), (S1, S0), (R, S0), (R, R), (S0, S0))
    laid = [nn.Parameter(layer.shard(numbers(5, 4 + k), *m)) for k, m in enumerate(marks)]
    return [*laid, nn.Parameter(numbers(3, 3))]


def computed(layer: Layer) -> list[Tensor]:
    """Return parameters made of computed values: norms, sums, means, products."""
    rows, columns = layer.shard(numbers(5, 6), S0, R), layer.shard(numbers(6, 5), R, S1)
    made = [
        rows.norm(dim=1, keepdim=True),
        columns.norm(dim=1, keepdim=True),
        rows.norm(dim=0, keepdim=True),
        columns.sum(1, keepdim=True),
        rows.mean(0, keepdim=True),
        (rows @ columns),
        rows.std() * rows.detach(),
    ]
    return [nn.Parameter(x.detach()) for x in made]


def transposed(layer: Layer) -> list[Tensor]:
    x = layer.shard(numbers(6, 5), S0, R)
    return [nn.Parameter(x.t()), nn.Parameter(x.t().contiguous()), nn.Parameter(layer.shard(numbers(6, 5).t(), S0, S1))]


def channels_last(layer: Layer) -> list[Tensor]:
    x = numbers(5, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(layer.shard(x, S0, R)), nn.Parameter(layer.shard(x, S1, S0))]


def vectors(layer: Layer) -> list[Tensor]:
    return [nn.Parameter(layer.shard(numbers(n), S0, R)) for n in (1, 3, 5, 8)] + [nn.Parameter(numbers(1)[0])]


def weight_norm(layer: Layer) -> list[Tensor]:
    v = nn.Parameter(layer.shard(numbers(5, 6), R, S1))
    return [v, nn.Parameter(v.detach().norm(dim=1, keepdim=True))]


def by_weight_norm(layer: Layer, params: Sequence[Tensor], step: int) -> Any:
    v, g = params
    x = layer.shard(numbers(4, 6, seed=step), S0, R)
    loss = F.linear(x, g * v / v.norm(dim=1, keepdim=True)).pow(2).mean()
    loss.backward()
    return loss


def embedding(layer: Layer) -> list[Tensor]:
    return [nn.Parameter(layer.shard(numbers(7, 4), S0, R)), nn.Parameter(layer.shard(numbers(7, 4), R, S1))]


def by_sparse_embedding(layer: Layer, params: Sequence[Tensor], step: int) -> Any:
    ids = layer.shard(torch.tensor([[0, 2, 2, 5], [1, 1, 6, 3 + step % 2]]), S1, R)
    loss = sum(((F.embedding(ids, p, sparse=True) - step) ** 2).sum() for p in params)
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss


SETTINGS = (
    Setting("rows sharded, uneven and empty", (4, 1), parameters(S0, R), by_loss),
    Setting("columns sharded on an axis behind one of size 1", (1, 4), parameters(R, S1), by_loss),
    Setting("both dims sharded, one axis of size 1", (1, 4), parameters(S0, S1), by_loss),
    Setting("both dims sharded", (2, 2), parameters(S0, S1), by_loss),
    Setting("replicated, used by batches", (2, 2), parameters(R, R), by_loss),
    Setting("each in a layout of its own", (2, 2), different, by_loss),
    Setting("vectors and a scalar", (2, 2), vectors, by_loss),
    Setting("sharded, gradient sharded otherwise", (2, 2), parameters(S0, R), by_hand(R, S1)),
    Setting("sharded, gradient partial", (2, 2), parameters(S0, S1), by_hand("partial")),
    Setting("sharded, gradient plain", (4, 1), parameters(S0, R), by_hand("plain")),
    Setting("replicated, gradient sharded", (2, 2), parameters(R, R), by_hand(S0, S1)),
    Setting("replicated, gradient partial", (2, 2), parameters(R, R), by_hand("partial")),
    Setting("computed", (2, 2), computed, by_loss),
    Setting("computed, gradient sharded", (2, 2), computed, by_hand(S0, R)),
    Setting("computed, gradient plain", (2, 2), computed, by_hand("plain")),
    Setting("transposed", (2, 2), transposed, by_loss),
    Setting("channels last", (2, 2), channels_last, by_loss),
    Setting("weight norm", (2, 2), weight_norm, by_weight_norm),
    Setting("sparse gradients", (2, 2), embedding, by_sparse_embedding),
)


def every(quick: bool) -> Iterator[tuple[type[torch.optim.Optimizer], dict[str, Any], list[Setting]]]:
    """Yield each class with its options and the settings to try; with `quick`, one of every few combinations."""
    for kind in classes():
        for at, options in enumerate(options_of(kind)):
            if not quick:
                yield kind, options, list(SETTINGS)
            elif at % 4 == 0:
                yield kind, options, [SETTINGS[(at + k) % len(SETTINGS)] for k in (0, 5, 12)]
