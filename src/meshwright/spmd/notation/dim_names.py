"""Helpers for the text of rules: a factor name per dim, with `!` if it must be whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

Dims = int | Sequence[int] | None
"""A `dim` argument of an operator; None means all dims."""


def dim_names(x: Tensor, letter: str = "a") -> list[str]:
    """Return one factor name per dim: `a0 a1 a2`."""
    return [f"{letter}{d}" for d in range(x.dim())]


def normalized_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """Return the dims of a `dim` argument, counted from 0; None and an empty list mean all dims."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    listed: Sequence[int] = [dim] if isinstance(dim, int) else dim
    return tuple(d % ndim for d in listed) if ndim else ()


def dims_of(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """Return the dims of `x` that a `dim` argument names, counted from 0."""
    return normalized_dims(dim, x.dim())


def names_and_dims(x: Tensor, dim: Dims) -> tuple[list[str], tuple[int, ...]]:
    """Return one factor name per dim, and the dims that a `dim` argument names."""
    return dim_names(x), dims_of(x, dim)


def operand_text(names: Sequence[str], whole: Collection[int] = ()) -> str:
    """Return the text of dims, with `!` for those in `whole`; `...` for no dims, since an operand must not be empty."""
    return "..." if not names else " ".join(f"{n}!" if d in whole else n for d, n in enumerate(names))


def sized_name(name: str, size: int) -> str:
    """Return a factor's name with its size, as factors of a product need it."""
    return f"{name}_{size}"


def product_text(names: Sequence[str]) -> str:
    """Return the text of a dim that is a product of factors, outermost first."""
    if not names:
        return "1"
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
