"""How the tables write dims: a name per dim, `!` where it must be whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor


def names_of(x: Tensor, letter: str = "a") -> list[str]:
    """One factor name per dim: `a0 a1 a2`."""
    return [f"{letter}{d}" for d in range(x.dim())]


def dims_at(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument means, counted from 0; None and an empty list mean all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    listed: Sequence[int] = [dim] if isinstance(dim, int) else dim
    return tuple(d % ndim for d in listed) if ndim else ()


def written(names: Sequence[str], whole: Collection[int] = ()) -> str:
    """The dims in text, those of `whole` marked so; no dims are `...`, since a last operand has to be seen."""
    return "..." if not names else " ".join(f"{n}!" if d in whole else n for d, n in enumerate(names))


def sized(name: str, size: int) -> str:
    """A factor's name that carries its size, as factors of a product must; `1` for a factor of one."""
    return f"{name}_{size}"


def grouped(names: Sequence[str]) -> str:
    """A dim that is the product of factors, outermost first."""
    if not names:
        return "1"
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
