"""Calls that torch's operator samples lack: lengths as lists, even kernels, loops that write to slices.

An `Own` operator has the attributes of an `op_db` entry that the sweep uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.opinfo.core import SampleInput


@dataclass(frozen=True)
class Own:
    """A function and its samples: for each, the first argument, the other arguments and the keyword arguments."""

    name: str
    function: Callable[..., Any]
    samples: Callable[[], Iterator[tuple[Any, ...]]]
    variant_test_name: str = ""
    inplace_variant: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def supports_dtype(self, dtype: torch.dtype, device: str) -> bool:
        return dtype is torch.float32

    def supported_backward_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[SampleInput]:
        for first, *rest in self.samples():
            kwargs = rest.pop() if rest and isinstance(rest[-1], dict) else {}
            args = tuple(_wanting(r, requires_grad) for r in rest)
            yield SampleInput(_wanting(first, requires_grad), args=args, kwargs=kwargs)


def _wanting(value: Any, gradient: bool) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.requires_grad_(gradient) if is_float else value


# --- ctc_loss ----------------------------------------------------------------------------------------------------

INPUTS, TARGETS = [6, 6, 5, 6, 4], [3, 2, 1, 3, 2]


def _ctc() -> Iterator[tuple[Any, ...]]:
    """Yield lengths as lists, tuples and tensors, with targets in rows and concatenated."""
    rows = torch.randint(1, 4, (5, 3))
    flat = torch.cat([row[:n] for row, n in zip(rows, TARGETS, strict=True)])
    kinds: tuple[Callable[[list[int]], Any], ...] = (list, tuple, torch.tensor)
    for targets in (rows, flat):
        for kind in kinds:
            for reduction in ("mean", "none", "sum"):
                scores = torch.randn(6, 5, 4)
                yield scores, targets, kind(INPUTS), kind(TARGETS), {"reduction": reduction}
    yield torch.randn(6, 4), rows[0], (6,), (3,)
    yield torch.randn(6, 5, 4), rows, INPUTS, [0, 2, 1, 3, 0], {"zero_infinity": True}


def _ctc_loss(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.ctc_loss(scores.log_softmax(-1), *args, **kwargs)


# --- convolutions ------------------------------------------------------------------------------------------------


def _even_kernels(spatial: int) -> Callable[[], Iterator[tuple[Any, ...]]]:
    kernels = {1: [(2,), (4,)], 2: [(2, 3), (3, 4), (2, 2), (4, 1)], 3: [(2, 3, 3), (3, 2, 1), (2, 2, 2)]}[spatial]

    def samples() -> Iterator[tuple[Any, ...]]:
        for kernel in kernels:
            for groups in (1, 2):
                x, w = torch.randn(2, 4, *[8, 5, 3][:spatial]), torch.randn(6, 4 // groups, *kernel)
                yield x, w, torch.randn(6), {"padding": "same", "groups": groups}
                yield x, w, None, {"padding": "same", "groups": groups, "dilation": 2}

    return samples


# --- loops that write to slices ----------------------------------------------------------------------------------


def _by_row(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for i in range(x.shape[0]):
        y[i] = x[i] * x[i]
    return y


def _by_column(x: Tensor) -> Tensor:
    y = x.clone()
    for j in range(x.shape[1]):
        y[:, j] += y[:, j - 1] * 0.5
    return y


def _by_block(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for i in range(0, x.shape[0], 2):
        y[i : i + 2] = x[i : i + 2].sin()
        y[i : i + 2, 1:] *= 2
    return y


def _by_select(x: Tensor) -> Tensor:
    y = x * 1
    for i in range(x.shape[0]):
        y.select(0, i).mul_(i + 1)
        y.narrow(1, 0, 1).add_(x.narrow(1, 0, 1))
    return y


def _by_piece(x: Tensor) -> Tensor:
    """Return a product with a detached copy that is written through `unbind` and `chunk`.

    torch allows no such writes to a tensor that requires a gradient.
    """
    y = x.detach().clone()
    for row in y.unbind(0):
        row.mul_(2)
    for piece in y.chunk(2, 1):
        piece.add_(1)
    return y * x


def _recurrence(x: Tensor) -> Tensor:
    y, state = torch.empty_like(x), torch.zeros_like(x[0])
    for i in range(x.shape[0]):
        state = torch.tanh(state * 0.5 + x[i])
        y[i] = state
    return y


def _matrices() -> Iterator[tuple[Any, ...]]:
    for shape in ((5, 3), (4, 4), (8, 2), (1, 4), (4, 3, 2)):
        yield (torch.randn(shape),)


LOOPS: Sequence[Callable[[Tensor], Tensor]] = (_by_row, _by_column, _by_block, _by_select, _by_piece, _recurrence)

OPS: tuple[Own, ...] = (
    Own("ctc_loss", _ctc_loss, _ctc),
    Own("conv1d with even kernels", F.conv1d, _even_kernels(1)),
    Own("conv2d with even kernels", F.conv2d, _even_kernels(2)),
    Own("conv3d with even kernels", F.conv3d, _even_kernels(3)),
    *(Own(f"loop {loop.__name__.strip('_')}", loop, _matrices) for loop in LOOPS),
)
