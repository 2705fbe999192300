"""Second forms of grouped products: rows that stand together by group, each group multiplied by a matrix of its own.

Kernels take rows from the first on, and strides of sixteen bytes. So a rank that holds some groups brings their rows
to the front and what it makes of them back to where they were, zero for the rows of all others; and pieces of dims that
are no multiple of sixteen bytes are filled up with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._forms import LocalCall
from ._forms_empty import nothing

_STRIDE = 16
"""Bytes that kernels want strides to be a multiple of."""


def rows_by_matrices(
    call: LocalCall, x: Tensor, w: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Rows `[t, k]` by matrices `[e, k, n]`: a rank's own groups, of the rows that it has."""
    if offs is None or 0 in (*x.shape, *w.shape):
        return nothing(call, x, w)
    bounds = _bounds(offs, call.start(0, 0), x.shape[0])
    return _own_groups(x, w, bounds, call.start(1, 0) if call.ranks(1, 0) > 1 else None, out_dtype)


def matrices_by_columns(
    call: LocalCall, x: Tensor, y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Matrices `[e, m, k]` by columns `[k, t]`, which stand together by group: the same, transposed."""
    if offs is None or 0 in (*x.shape, *y.shape):
        return nothing(call, x, y)
    bounds, t = _bounds(offs, call.start(1, 1), y.shape[1]), y.shape[1]
    first = call.start(0, 0) if call.ranks(0, 0) > 1 else None
    return _own_groups(_filled(y, 1).mT, x.mT, bounds, first, out_dtype).mT[:, :t]


def columns_by_rows(
    call: LocalCall, x: Tensor, y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`[m, t]` by `[t, n]`, a product `[m, n]` of each group: a rank's term of it, from the part of t that it has."""
    if offs is None or 0 in (*x.shape, y.shape[1]):
        return nothing(call, x, y)
    ends = _bounds(offs, call.start(1, 0), y.shape[0])[1:]
    m, n = x.shape[0], y.shape[1]
    x, y = _filled(_filled(x, 0), 1), _filled(_filled(y, 0), 1)
    return torch.ops.aten._grouped_mm(x, y, ends, None, out_dtype)[:, :m, :n]


def matrices_by_matrices(
    call: LocalCall, x: Tensor, y: Tensor, offs: None = None, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """One product for each group, which needs no kernel of its own."""
    out = torch.bmm(x, y)
    return out if out_dtype is None else out.to(out_dtype)


def _own_groups(x: Tensor, w: Tensor, bounds: Tensor, first: int | None, out_dtype: torch.dtype | None) -> Tensor:
    """The products of the groups from `first` on, zero for other rows; all groups are here where that is None."""
    if first is None:
        return _product(x, w, bounds[1:], out_dtype)
    groups, rows = w.shape[0], x.shape[0]
    bounds = bounds.index_select(0, torch.arange(groups + 1, device=bounds.device) + first)
    begin, ends = bounds[0], bounds[1:] - bounds[0]
    place = torch.arange(rows, device=bounds.device)
    mine = (place < ends[-1]).unsqueeze(1)  # kernels leave other rows, and their gradients, as they find them
    front = torch.where(mine, x.index_select(0, (place + begin) % rows), 0)
    out = torch.where(mine, _product(front, w, ends, out_dtype), 0)
    return out.index_select(0, (place - begin) % rows)


def _bounds(offs: Tensor, start: int, rows: int) -> Tensor:
    """Where groups begin among the rows from `start` on, and where the last ends."""
    return torch.constant_pad_nd(offs - start, (1, 0)).clamp(0, rows).to(offs.dtype)


def _product(x: Tensor, w: Tensor, ends: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    n = w.shape[2]
    x, w = _filled(x, 1), _filled(_filled(w, 1), 2)
    out = torch.ops.aten._grouped_mm(x.contiguous(), w, ends, None, out_dtype)
    return out if w.shape[2] == n else out[:, :n]


def _filled(x: Tensor, dim: int) -> Tensor:
    """`x` with zeros behind, up to a size that kernels take."""
    missing = -x.shape[dim] % (_STRIDE // x.dtype.itemsize)
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
