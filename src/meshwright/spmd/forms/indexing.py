"""Local forms of lookups along a sharded dim: each rank looks up the indices that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.dim_names import dims_of
from ..notation.local_call import LocalCall
from ..torch_hooks import can_assert_on

NOTHING = False
"""Fill value for indices of other ranks: a zero that does not promote any dtype, including bool."""


def check_bounds(index: Tensor, size: int, dim: int, lowest: int = 0) -> None:
    """Raise RuntimeError if an index is below `lowest`, or not below `size`, the size of the whole dim.

    Without this check, each rank would take such an index for one of another rank. On CUDA devices the check is an
    assertion on the device, as in the kernels of torch. A device that has no kernel for assertions checks no index.
    """
    if not can_assert_on(index.device):
        return
    inside = (index >= lowest) & (index < size)
    allowed = f"{lowest} to {size - 1}" if size else "none, because the dim is empty"
    message = f"index out of bounds for dimension {dim} with size {size}; allowed indices: {allowed}"
    torch.ops.aten._assert_async.msg(inside.all(), message)


def _mine(call: LocalCall, x: Tensor, at: int, index: Tensor, wraps: bool = False) -> tuple[Tensor, Tensor]:
    """Return the local indices (0 for indices of other ranks), and a mask of the indices of this rank.

    `wraps` is True if the operator accepts negative indices, which count from the end.
    """
    size = call.total(0, at)
    check_bounds(index, size, at, -size if wraps else 0)
    if wraps:
        index = torch.where(index < 0, index + size, index)
    local = index - call.start(0, at)
    mine = (local >= 0) & (local < x.shape[at])
    return torch.where(mine, local, 0), mine


def index_select(call: LocalCall, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the rows that this rank holds and zero for others, which is a term of the result."""
    (at,) = dims_of(x, dim)
    local, mine = _mine(call, x, at, index.reshape(-1))
    shape = [-1 if d == at else 1 for d in range(x.dim())]
    return torch.where(mine.reshape(shape), _padded(x, at).index_select(at, local), NOTHING)


def gather(call: LocalCall, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    (at,) = dims_of(x, dim)
    local, mine = _mine(call, x, at, index)
    return torch.where(mine, _padded(x, at).gather(at, local), NOTHING)


def _padded(x: Tensor, at: int) -> Tensor:
    """Return `x`, or one row of zeros if this rank has no rows, so that the lookup has a valid index."""
    if x.shape[at]:
        return x
    row = x.new_zeros([1 if d == at else n for d, n in enumerate(x.shape)])
    return row + x.sum(at, keepdim=True, dtype=x.dtype)


def index(call: LocalCall, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Return the term of `x[indices]` for one indexed dim, which is sharded."""
    at, index = next((d, i) for d, i in enumerate(indices) if i is not None)
    index = index.to(x.device)  # torch takes indices on the CPU for any device
    local, mine = _mine(call, x, at, index, wraps=True)
    rows = torch.ops.aten.index.Tensor(_padded(x, at), [*indices[:at], local])
    return torch.where(mine.reshape([*mine.shape, *[1] * (x.dim() - at - 1)]), rows, NOTHING)


def index_copy(call: LocalCall, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Return `x` with the local rows of `source`. Rows of other ranks are written after the last row and dropped."""
    return _written(call, x, dim, index, lambda wide, at, local: wide.index_copy(at, local, source))


def index_add(call: LocalCall, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return _written(call, x, dim, index, lambda wide, at, local: wide.index_add(at, local, source, alpha=alpha))


def index_fill(call: LocalCall, x: Tensor, dim: int, index: Tensor, value: TorchValue) -> Tensor:
    return _written(call, x, dim, index, lambda wide, at, local: wide.index_fill(at, local, value), wraps=True)


def scatter(call: LocalCall, x: Tensor, dim: int, index: Tensor, value: TorchValue) -> Tensor:
    return _written(call, x, dim, index, lambda wide, at, local: wide.scatter(at, local, value))


def scatter_add(call: LocalCall, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _written(call, x, dim, index, lambda wide, at, local: wide.scatter_add(at, local, src))


def _written(
    call: LocalCall,
    x: Tensor,
    dim: int,
    index: Tensor,
    write: Callable[[Tensor, int, Tensor], Tensor],
    wraps: bool = False,
) -> Tensor:
    (at,) = dims_of(x, dim)
    local, mine = _mine(call, x, at, index, wraps)
    size = x.shape[at]
    wide = torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - at) + [0, 1])  # torch.cat would disconnect an empty x
    return write(wide, at, torch.where(mine, local, size)).narrow(at, 0, size)


def masked_scatter(call: LocalCall, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return the local tensor after a masked scatter. The whole mask gives the index in the source for each element."""
    shape = [call.total(0, d) for d in range(x.dim())]
    mask = mask.expand(shape)
    order = (mask.flatten().cumsum(0) - 1).reshape(shape)
    for d in range(x.dim()):
        if call.ranks(0, d) > 1:
            rows = torch.arange(x.shape[d], device=x.device) + call.start(0, d)
            mask, order = mask.index_select(d, rows), order.index_select(d, rows)
    if not source.numel():
        return x + source.sum().to(x.dtype)
    return torch.where(mask, source.flatten()[order.clamp(0, source.numel() - 1)], x)
