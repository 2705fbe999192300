"""Chains of two or three view operators, and one write to the last view or to the base.

The first operators of a chain decide the memory of a view, and the next operators look at this memory. So each chain
runs on tensors in several memory orders: one that is right for a contiguous tensor may be wrong for a transposed one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

View = Callable[[Any], Any]

VIEWS: dict[str, View] = {
    "[n//2:]": lambda x: x[x.shape[0] // 2 :],
    "[..., 1:]": lambda x: x[..., 1:],
    "[::2]": lambda x: x[::2],
    "[..., 1::2]": lambda x: x[..., 1::2],
    "[1]": lambda x: x[1],
    "[..., -1]": lambda x: x[..., -1],
    "[1:, 1]": lambda x: x[1:, 1],
    ".mT": lambda x: x.transpose(-1, -2),
    ".permute(-1, ...)": lambda x: x.permute(-1, *range(x.dim() - 1)),
    ".split(2)[-1]": lambda x: x.split(2)[-1],
    ".chunk(2, -1)[0]": lambda x: x.chunk(2, -1)[0],
    ".unbind(-1)[1]": lambda x: x.unbind(-1)[1],
    ".narrow(0, 1, 2)": lambda x: x.narrow(0, 1, 2),
    ".unflatten(0, (2, -1))": lambda x: x.unflatten(0, (2, -1)),
    ".view(-1, n)": lambda x: x.view(-1, x.shape[-1]),
    ".flatten(0, 1)": lambda x: x.flatten(0, 1),
    ".unsqueeze(0)": lambda x: x.unsqueeze(0),
    ".diagonal()": lambda x: x.diagonal(),
    ".data": lambda x: x.data,
}

ORDERS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "contiguous": lambda s: tuple(range(len(s))),
    "transposed": lambda s: tuple(reversed(range(len(s)))),
    "channels last": lambda s: (0, *range(2, len(s)), 1),
    "rolled": lambda s: (*range(1, len(s)), 0),
}
"""Memory order → dims of the base from the outermost to the innermost in memory."""

SHAPES: tuple[tuple[int, ...], ...] = ((6, 4), (4, 6), (3, 2, 6), (4, 1, 5), (2, 4, 2, 3))


def _numbers(x: Any) -> Tensor:
    return torch.arange(math.prod(x.shape), dtype=torch.float32).reshape(x.shape) - 3


def _set(x: Any, value: Any) -> None:
    x[...] = value


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "fill_": lambda base, view: view.fill_(9.0),
    "add_": lambda base, view: view.add_(5),
    "copy_": lambda base, view: view.copy_(_numbers(view)),
    "setitem": lambda base, view: _set(view, _numbers(view)),
    "a step of both": lambda base, view: (view.mul_(2), base.add_(1), view.sub_(3)),
}


@dataclass(frozen=True)
class Chain:
    """One program: views of a base in one memory order, and a write; `grad` is True if autograd records the write."""

    views: tuple[str, ...]
    shape: tuple[int, ...]
    order: str
    write: str
    grad: bool

    @property
    def operator(self) -> str:
        """Return the operator by which a refused chain is counted."""
        return "chain"

    @property
    def name(self) -> str:
        """Return a description of the base, the views and the write."""
        how = "" if self.grad else " without gradients"
        return f"{self.order} {self.shape}: x{''.join(self.views)}, {self.write}{how}"

    def base(self) -> Tensor:
        """Return the value of the base, the same in every process."""
        order = ORDERS[self.order](self.shape)
        count = math.prod(self.shape)
        value = ((torch.arange(count, dtype=torch.float32) * 7) % 23 - 11).reshape([self.shape[d] for d in order])
        return value.permute([order.index(d) for d in range(len(order))])

    def run(self, leaf: Any) -> dict[str, Any]:
        """Return the values that the program computes."""
        base = leaf * 1 if self.grad else leaf.detach() * 1
        view = base
        for name in self.views:
            view = VIEWS[name](view)
        WRITES[self.write](base, view)
        return {"strides": strides_of(view), "values": [base, view, leaf]}


def strides_of(x: Any) -> list[int]:
    """Return the strides of the dims with more than one element; empty for a tensor without elements."""
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else []


def chains() -> Iterator[Chain]:
    """Yield a program for each chain of two views with each base, and for each chain of three views with one base."""
    bases = itertools.cycle(itertools.product(SHAPES, ORDERS))
    writes = itertools.cycle(itertools.product(WRITES, (True, False)))
    for views in itertools.product(VIEWS, repeat=2):
        for base in itertools.product(SHAPES, ORDERS):
            yield Chain(views, *base, *next(writes))
    for views in itertools.product(VIEWS, repeat=3):
        yield Chain(views, *next(bases), *next(writes))
