"""Rules of operators that join tensors or expand them to one shape: `cat`, `stack` and similar ones.

`broadcast_tensors` and `meshgrid` have no rule: each of their results is a view of another operand.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.dim_names import dim_names, operand_text
from ..notation.rule import Entry


def cat_rule(tensors: Sequence[Tensor], dim: int = 0) -> str:
    """Return the rule of `cat`: the joined dim is whole. An empty one-dim tensor may be joined with any tensor."""
    full = next((t for t in tensors if t.dim() > 1 or t.numel()), tensors[0])
    at = dim % full.dim()
    names = dim_names(full)
    operands = [
        "e!" if t.dim() != full.dim() else " ".join(f"j{i}!" if d == at else n for d, n in enumerate(names))
        for i, t in enumerate(tensors)
    ]
    return f"{' + '.join(operands)} -> {' '.join('new' if d == at else n for d, n in enumerate(names))}"


def stack_rule(tensors: Sequence[Tensor], dim: int = 0) -> str:
    names = dim_names(tensors[0])
    at = dim % (len(names) + 1)
    return f"{' + '.join([operand_text(names)] * len(tensors))} -> {' '.join([*names[:at], 'new', *names[at:]])}"


def hstack_rule(tensors: Sequence[Tensor]) -> str | None:
    dims = _common_dims(tensors)
    return cat_rule(tensors, min(1, dims - 1)) if dims else None


def vstack_rule(tensors: Sequence[Tensor]) -> str | None:
    dims = _common_dims(tensors)
    if dims == 1:
        return stack_rule(tensors, 0)
    return cat_rule(tensors, 0) if dims else None


def column_stack_rule(tensors: Sequence[Tensor]) -> str | None:
    return stack_rule(tensors, 1) if _common_dims(tensors) == 1 else hstack_rule(tensors)


def dstack_rule(tensors: Sequence[Tensor]) -> str | None:
    return cat_rule(tensors, 2) if _common_dims(tensors) > 2 else None


def _common_dims(tensors: Sequence[Tensor]) -> int:
    """Return the number of dims that all tensors share; 0 if they differ, since torch then adds dims to some."""
    dims = {t.dim() for t in tensors}
    return dims.pop() if len(dims) == 1 else 0


def at_least(ndim: int) -> Entry:
    def entry(x: TorchValue) -> str | None:
        if not isinstance(x, Tensor):
            return None
        names = operand_text(dim_names(x))
        if x.dim() >= ndim:
            return f"{names} -> {names}"
        front, behind = {(1, 2): ("1", ""), (1, 3): ("1", "1"), (2, 3): ("", "1")}.get((x.dim(), ndim), ("", ""))
        return f"{names} -> {front} {names} {behind}" if x.dim() else f"-> {' '.join(['1'] * ndim)}"

    return entry


JOIN: dict[str, Entry] = {
    **dict.fromkeys(("aten.cat", "aten.concat", "aten.concatenate"), cat_rule),
    "aten.stack": stack_rule,
    "aten.hstack": hstack_rule,
    "aten.vstack": vstack_rule,
    "aten.dstack": dstack_rule,
    "aten.column_stack": column_stack_rule,
    "aten.expand_as": "... | ... -> ...",
    "aten.atleast_1d": at_least(1),
    "aten.atleast_2d": at_least(2),
    "aten.atleast_3d": at_least(3),
}
