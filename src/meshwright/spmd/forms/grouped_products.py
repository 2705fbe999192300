"""Local forms of grouped matrix products: rows are ordered by group, and each group is multiplied by its own matrix.

Kernels need rows that start with the first group, and strides that are multiples of 16 bytes. So a rank with some of
the groups rolls their rows to the front, multiplies, and rolls the result back; all other rows are zero. Shards of dims
that are no multiple of 16 bytes are padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..notation.local_call import LocalCall
from .empty_tensors import empty_result

_STRIDE = 16
"""Alignment of strides in bytes that kernels need."""


def rows_by_matrices(
    call: LocalCall,
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply rows `[t, k]` by matrices `[e, k, n]`: the local groups and local rows of a rank."""
    if offs is None or 0 in (*x.shape, *w.shape):
        return empty_result(call, x, w)
    bounds = _bounds(offs, call.start(0, 0), x.shape[0])
    return _own_groups(x, w, bounds, call.start(1, 0) if call.ranks(1, 0) > 1 else None, out_dtype)


def matrices_by_columns(
    call: LocalCall,
    x: Tensor,
    y: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply matrices `[e, m, k]` by columns `[k, t]` ordered by group: the transposed `rows_by_matrices`."""
    if offs is None or 0 in (*x.shape, *y.shape):
        return empty_result(call, x, y)
    bounds, t = _bounds(offs, call.start(1, 1), y.shape[1]), y.shape[1]
    first = call.start(0, 0) if call.ranks(0, 0) > 1 else None
    return _own_groups(_filled(y, 1).mT, x.mT, bounds, first, out_dtype).mT[:, :t]


def columns_by_rows(
    call: LocalCall,
    x: Tensor,
    y: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply `[m, t]` by `[t, n]` to a product `[m, n]` per group: a rank's term, from its shard of t."""
    if offs is None or 0 in (*x.shape, y.shape[1]):
        return empty_result(call, x, y)
    ends = _bounds(offs, call.start(1, 0), y.shape[0])[1:]
    m, n = x.shape[0], y.shape[1]
    x, y = _filled(_filled(x, 0), 1), _filled(_filled(y, 0), 1)
    return torch.ops.aten._grouped_mm(x, y, ends, None, out_dtype)[:, :m, :n]


def matrices_by_matrices(
    call: LocalCall, x: Tensor, y: Tensor, offs: None = None, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply one matrix by one matrix for each group, by `bmm`."""
    out = torch.bmm(x, y)
    return out if out_dtype is None else out.to(out_dtype)


def _own_groups(x: Tensor, w: Tensor, bounds: Tensor, first: int | None, out_dtype: torch.dtype | None) -> Tensor:
    """Return the products of the local groups, which start at `first`, with zero for other rows.

    If `first` is None, all groups are local.
    """
    if first is None:
        return _product(x, w, bounds[1:], out_dtype)
    groups, rows = w.shape[0], x.shape[0]
    bounds = bounds.index_select(0, torch.arange(groups + 1, device=bounds.device) + first)
    begin, ends = bounds[0], bounds[1:] - bounds[0]
    place = torch.arange(rows, device=bounds.device)
    mine = (place < ends[-1]).unsqueeze(1)  # kernels do not initialize other rows and their gradients
    front = torch.where(mine, x.index_select(0, (place + begin) % rows), 0)
    out = torch.where(mine, _product(front, w, ends, out_dtype), 0)
    return out.index_select(0, (place - begin) % rows)


def _bounds(offs: Tensor, start: int, rows: int) -> Tensor:
    """Return the local start of each group among the `rows` rows from `start` on, and the end of the last one."""
    return torch.constant_pad_nd(offs - start, (1, 0)).clamp(0, rows).to(offs.dtype)


def _product(x: Tensor, w: Tensor, ends: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    n = w.shape[2]
    x, w = _filled(x, 1), _filled(_filled(w, 1), 2)
    out = torch.ops.aten._grouped_mm(x.contiguous(), w, ends, None, out_dtype)
    return out if w.shape[2] == n else out[:, :n]


def _filled(x: Tensor, dim: int) -> Tensor:
    """Return `x` padded with zeros to a size that kernels accept."""
    missing = -x.shape[dim] % (_STRIDE // x.dtype.itemsize)
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
