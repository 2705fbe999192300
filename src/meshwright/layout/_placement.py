"""Placements: the distribution of a tensor along one mesh axis, as users write it."""

from __future__ import annotations

from dataclasses import dataclass

from ._errors import PlacementError

PARTIAL_OPS = ("sum", "avg", "max", "min", "prod", "any", "all")


class Placement:
    """Distribution of a tensor along one mesh axis: `Replicate()`, `Shard(dim)` or `Partial(op)`."""

    __slots__ = ()

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_shard(self, dim: int | None = None) -> bool:
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_partial(self) -> bool:
        return isinstance(self, Partial)


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank holds the whole value."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Each rank holds a slice along `dim`: shards of ceil(n / ranks) elements, the last ones shorter or empty.

    Raises:
        PlacementError: `dim` is not an integer.
    """

    dim: int

    def __post_init__(self) -> None:
        if not hasattr(self.dim, "__index__"):
            raise PlacementError(
                f"Shard({self.dim!r})", f"a {type(self.dim).__name__}", "a dim is an integer", "use Shard(0)"
            )

    def get_dim(self) -> int:
        return self.dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each rank holds a term; the value is `op` over the ranks: sum, avg, max, min, prod, any or all.

    Raises:
        PlacementError: `op` is none of these.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in PARTIAL_OPS:
            raise PlacementError(
                f"Partial({self.op!r})",
                "an unknown operation",
                f"terms are combined by one of {len(PARTIAL_OPS)} operations",
                f"use one of {', '.join(PARTIAL_OPS)}",
            )

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"
