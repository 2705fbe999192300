"""Rules of reads and writes by index: indexed dims are whole or use a local form; all other dims are free."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..forms import indexing as forms
from ..forms.empty_tensors import trim_to_shape, zeros_for_empty
from ..notation.dim_names import dim_names, dims_of, names_and_dims, operand_text
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, LocalForm, Rule
from .shapes import slice_rule

Indices = Sequence[Tensor | None]


def _joining_operation(x: Tensor) -> str | None:
    """Return the operation that joins the ranks' results: "any" for bool, which has no sum; None otherwise."""
    return "any" if x.dtype == torch.bool else None


def _has_no_rule(indices: Indices) -> bool:
    """True for masks, which pick a number of elements that depends on their values, and without any index."""
    given = [i for i in indices if i is not None]
    return not given or any(i.dtype in (torch.bool, torch.uint8) for i in given)


def _index_names(indices: Indices) -> tuple[list[str], list[str]]:
    """Return the dims of every index, and the dims of all indices broadcast together, aligned at the end."""
    widest = max(i.dim() for i in indices if i is not None)
    joint = [f"j{d}" for d in range(widest)]
    return [" ".join(joint[widest - i.dim() :]) if i is not None else "" for i in indices], joint


def _indexed_names(x: Tensor, indices: Indices) -> tuple[list[int], list[str], list[str]]:
    """Return the indexed dims, the names of each index, and the names of the result of `x[indices]`."""
    at = [d for d, i in enumerate(indices) if i is not None]
    each, joint = _index_names(indices)
    names = dim_names(x)
    kept = [n for d, n in enumerate(names) if d not in at]
    together = at[-1] - at[0] + 1 == len(at)
    front = at[0] if together else 0
    return at, each, kept[:front] + joint + kept[front:]


def index_rule(x: Tensor, indices: Indices) -> Rule | None:
    """Return the rule of `x[indices]`; None for masks, since the number of picked elements depends on their values."""
    if _has_no_rule(indices):
        return None
    at, each, result = _indexed_names(x, indices)
    names = dim_names(x)
    form = {names[at[0]]: forms.index} if len(at) == 1 else {}
    whole = () if form else at
    return Rule(
        f"{operand_text(names, whole)} | {' , '.join(each)} -> {operand_text(result)}",
        _joining_operation(x),
        forms=form,
    )


def index_put_rule(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> str | None:
    names = dim_names(x)
    if not names:
        return None
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool and values.numel() == 1:
        return f"{operand_text(names)}, {operand_text(names[: indices[0].dim()])}, ... -> {operand_text(names)}"
    if _has_no_rule(indices):
        return None
    at, each, result = _indexed_names(x, indices)
    given = result[len(result) - values.dim() :] if values.dim() <= len(result) else None
    if given is None:
        return None
    writes = [f"{n}!" if n.startswith("j") else n for n in given]
    return f"{operand_text(names, at)}, {' , '.join(each)}, {' '.join(writes) or '...'} -> {operand_text(names)}"


def index_select_rule(x: Tensor, dim: int, index: Tensor) -> Rule | None:
    names = dim_names(x)
    if not names:
        return None
    (at,) = dims_of(x, dim)
    picked = "j" if index.dim() else "1"
    result = [picked if d == at else n for d, n in enumerate(names)]
    text = f"{operand_text(names)} | {picked if index.dim() else ''} -> {' '.join(result)}"
    return Rule(text, _joining_operation(x), forms={names[at]: forms.index_select})


def gather_rule(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Rule | None:
    """Return the rule of `gather`: the index has all dims of x, with equal or smaller sizes."""
    if not x.dim() or x.dim() != index.dim():
        return None
    mine, theirs = _aligned_names(x, index, dim)
    at = dim % x.dim()
    text = f"{' '.join(mine)} | {' '.join(theirs)} -> {' '.join(theirs)}"
    return Rule(text, _joining_operation(x), forms={mine[at]: forms.gather})


def _aligned_names(x: Tensor, index: Tensor, dim: int) -> tuple[list[str], list[str]]:
    """Return the names of the dims of both: a dim with different sizes is whole, except the indexed one."""
    mine, theirs = dim_names(x), dim_names(index, "j")
    for d, (m, n) in enumerate(zip(x.shape, index.shape, strict=True)):
        if d == dim % x.dim():
            continue
        if m == n or 1 in (m, n):
            theirs[d] = mine[d]
        else:
            mine[d], theirs[d] = f"{mine[d]}!", f"{theirs[d]}!"
    return mine, [t.removesuffix("!") if t == m else t for m, t in zip(mine, theirs, strict=True)]


def scatter_rule(form: LocalForm | None) -> Entry:
    """Return the rule of `op(x, dim, index, src)`: dims with equal sizes are free.

    Index and source are whole along the other dims.
    """

    def entry(
        x: Tensor, dim: int, index: Tensor, src: TorchValue, *args: TorchValue, **kwargs: TorchValue
    ) -> Rule | None:
        others = [t for t in (index, src) if isinstance(t, Tensor)]
        if not x.dim() or any(t.dim() != x.dim() for t in others):
            return None
        (at,) = dims_of(x, dim)
        names, free = dim_names(x), _equal_dims(x, others, at)
        used = form if not args and not kwargs and len(free) == x.dim() - 1 else None
        whole = [d for d in range(x.dim()) if d not in free and not (used and d == at)]
        sides = [_side_text(names, free, letter) for letter in "js"[: len(others)]]
        sides += ["..."] * (2 - len(others))
        text = f"{operand_text(names, whole)}, {', '.join(sides)} -> {operand_text(names)}"
        return Rule(text, forms={names[at]: used} if used else {})

    return entry


def _equal_dims(x: Tensor, others: Sequence[Tensor], at: int) -> list[int]:
    """Return the dims of `x` except `at` that have the same size in all others."""
    return [d for d in range(x.dim()) if d != at and all(t.shape[d] == x.shape[d] for t in others)]


def _side_text(names: Sequence[str], free: Sequence[int], letter: str) -> str:
    """Return the text of an operand with the dims of x in `free`, and with whole dims of its own elsewhere."""
    return " ".join(name if d in free else f"{letter}{d}!" for d, name in enumerate(names))


def rows_rule(form: LocalForm | None) -> Entry:
    """Return the rule of `op(x, dim, index, source)`: along `dim`, the source has the length of the index."""

    def entry(
        x: Tensor, dim: int, index: Tensor, source: TorchValue = None, *args: TorchValue, **kwargs: TorchValue
    ) -> Rule | None:
        source = kwargs.get("value") if source is None else source
        if not x.dim() or (isinstance(source, Tensor) and source.dim() not in (0, x.dim())):
            return None
        (at,) = dims_of(x, dim)
        names = dim_names(x)
        rows = " ".join("j!" if d == at else n for d, n in enumerate(names))
        given = rows if isinstance(source, Tensor) and source.dim() else "..."
        operand = operand_text(names, () if form else (at,))
        text = f"{operand}, {'j!' if index.dim() else ''}, {given} -> {operand_text(names)}"
        return Rule(text, forms={names[at]: form} if form else {})

    return entry


def masked_scatter_rule(x: Tensor, mask: Tensor, source: Tensor) -> Rule | None:
    """Return the rule of `masked_scatter`: mask and source are whole.

    The mask shows how many source elements come before each shard.
    """
    if torch.broadcast_shapes(x.shape, mask.shape) != x.shape:
        return None
    names = dim_names(x)
    whole = [
        operand_text([f"{letter}{d}" for d in range(t.dim())], range(t.dim()))
        for letter, t in (("m", mask), ("s", source))
    ]
    return Rule(
        f"{operand_text(names)}, {', '.join(whole)} -> {operand_text(names)}",
        forms=dict.fromkeys(names, forms.masked_scatter),
    )


def take_rule(x: Tensor, index: Tensor) -> str:
    return f"{operand_text(dim_names(x), range(x.dim()))} | ... -> ..."


def slice_scatter_rule(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> str:
    """Return the rule of `slice_scatter`, which is linear in both operands."""
    names, (at,) = names_and_dims(x, dim)
    left = slice_rule(x, dim, start, end, step).partition(" -> ")[0]
    full = not left.split()[at].endswith("!")
    rows = " ".join("s!" if d == at and not full else n for d, n in enumerate(names))
    return f"{left} + {rows} -> {operand_text(names)}"


def select_scatter_rule(x: Tensor, src: Tensor, dim: int, index: int) -> str:
    names, (at,) = names_and_dims(x, dim)
    return f"{operand_text(names, (at,))} + {operand_text(names[:at] + names[at + 1 :])} -> {operand_text(names)}"


def diagonal_scatter_rule(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    names, gone = names_and_dims(x, (dim1, dim2))
    kept = [n for d, n in enumerate(names) if d not in gone]
    return f"{operand_text(names, gone)} + {' '.join([*kept, 's!'])} -> {operand_text(names)}"


def one_hot_rule(x: Tensor, num_classes: int = -1) -> str | None:
    return "..., -> ... new" if num_classes > 0 else None


def embedding_bag_rule(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    *rest: TorchValue,
    **kwargs: TorchValue,
) -> Rule | None:
    """Return the rule that shards columns; side results do not depend on them, except for the maximum.

    There is no rule with `include_last_offset`, or for a weight with non-contiguous columns: torch's meta kernel then
    returns side results of other sizes than the real kernels.
    """
    if sparse or mode == 2 or include_last_offset or weight.stride(-1) != 1:
        return None

    def by_columns(call: LocalCall, weight: Tensor, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        weight = zeros_for_empty(weight, sizes=[call.total(0, d) for d in range(2)])  # the gradient reads one column
        out, *sides = torch.ops.aten.embedding_bag(weight, *args, **kwargs)
        return trim_to_shape(out, call.out_shape(0)), *sides

    text = f"v! d, i!, o!{', i!' if per_sample_weights is not None else ''} -> new d ; new ; new ; new"
    return Rule(text, forms={"d": by_columns})


def searchsorted_rule(
    boundaries: Tensor, x: TorchValue, *, sorter: Tensor | None = None, **kwargs: TorchValue
) -> str | None:
    if sorter is not None or not isinstance(x, Tensor):
        return None
    return "v!, ... -> ..." if boundaries.dim() == 1 else "... v!, ... j -> ... j"


INDEX: dict[str, Entry] = {
    **dict.fromkeys(("aten.index.Tensor", "aten._unsafe_index.Tensor"), index_rule),
    **dict.fromkeys(("aten.index_put", "aten._unsafe_index_put"), index_put_rule),
    "aten.masked_scatter": masked_scatter_rule,
    "aten.index_select": index_select_rule,
    "aten.gather": gather_rule,
    **dict.fromkeys(("aten.scatter", "aten.scatter_reduce"), scatter_rule(None)),
    "aten.scatter.value": scatter_rule(forms.scatter),
    "aten.scatter.src": scatter_rule(forms.scatter),
    "aten.scatter_add": scatter_rule(forms.scatter_add),
    "aten.index_copy": rows_rule(forms.index_copy),
    "aten.index_add": rows_rule(forms.index_add),
    "aten.index_fill": rows_rule(forms.index_fill),
    "aten.index_reduce": rows_rule(None),
    "aten.take": take_rule,
    "aten.slice_scatter": slice_scatter_rule,
    "aten.select_scatter": select_scatter_rule,
    "aten.diagonal_scatter": diagonal_scatter_rule,
    "aten.one_hot": one_hot_rule,
    "aten.embedding_bag": embedding_bag_rule,
    "aten.searchsorted": searchsorted_rule,
}
