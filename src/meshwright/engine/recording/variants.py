"""One program per kind of batch: find the recorded program for a batch, and the sizes that the next one leaves open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from meshwright.layout import Cache
from meshwright.tensor import DistTensor

from .._errors import StaticError
from .setting import Setting

T = TypeVar("T")
Sizes = tuple[tuple[int, ...], ...]
MOST_SETTINGS = 4
"""Most settings that are kept for one program; the oldest is forgotten first, and captured again when it returns."""
Dynamic = Mapping[int, frozenset[int]]
"""Leaf of the batch → its dims whose sizes may change."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramVariant(Generic[T]):
    """A program, the sizes it was recorded for, the dims with open sizes, its test of other sizes, and its setting.

    Variants with one `digest` have the same program, in other settings.
    """

    program: T
    sizes: Sizes
    dynamic: Dynamic
    holds: Callable[[Sequence[Any]], bool]
    setting: Setting
    digest: str | None = None

    def takes(self, sizes: Sizes, leaves: Sequence[Any]) -> bool:
        return fits_sizes(self.sizes, self.dynamic, sizes) and self.holds(leaves)


@dataclass(slots=True)
class Variants(Generic[T]):
    """The programs recorded so far, at most `most`. For a batch of new sizes, the changed sizes become symbolic."""

    most: int
    exact: dict[Any, list[ProgramVariant[T]]] = field(
        default_factory=lambda: Cache[Any, "list[ProgramVariant[T]]"](1024)
    )
    known: dict[Any, list[ProgramVariant[T]]] = field(default_factory=dict[Any, "list[ProgramVariant[T]]"])
    fixed: set[Any] = field(default_factory=set[Any])
    """The keys of calls whose programs cannot leave sizes open."""

    @property
    def count(self) -> int:
        """Return the number of different programs that were recorded."""
        without = sum(v.digest is None for variants in self.known.values() for v in variants)
        return len(self._digests() - {None}) + without

    def find(self, key: object, leaves: Sequence[Any]) -> T | None:
        """Return the program for the batch in the present setting, or None; calls with one `key` differ in sizes."""
        skeleton = (key, tuple(map(kind_of, leaves)))
        sizes = sizes_of(leaves)
        exact = self.exact.get((skeleton, sizes), [])
        for variant in reversed(exact):
            if variant.setting.holds():
                return variant.program
        for variant in reversed(self.known.get(skeleton, [])):
            if variant not in exact and variant.takes(sizes, leaves) and variant.setting.holds():
                self.exact.setdefault((skeleton, sizes), []).append(variant)
                return variant.program
        return None

    def open_sizes(self, key: object, leaves: Sequence[Any]) -> Dynamic:
        """Return the dims that the next program should leave open: those in which batches of this kind differ.

        Raises StaticError for new sizes if there are `most` programs.
        """
        skeleton, sizes = (key, tuple(map(kind_of, leaves))), sizes_of(leaves)
        if not any(v.digest is not None and v.sizes == sizes for v in self.known.get(skeleton, ())):
            self._check_count(leaves)
        if key in self.fixed:
            return {}
        found: dict[int, set[int]] = {}
        for variant in (v for v in self.known.get(skeleton, ()) if v.setting.holds()):
            for leaf, d in differences(variant.sizes, sizes_of(leaves)):
                found.setdefault(leaf, set()).add(d)
            for leaf, dims in variant.dynamic.items():
                found.setdefault(leaf, set()).update(dims)
        return {leaf: frozenset(dims) for leaf, dims in found.items()}

    def add(self, key: object, leaves: Sequence[Any], variant: ProgramVariant[T]) -> None:
        """Add a program that was recorded for this batch.

        If one program has more than MOST_SETTINGS variants, the oldest variants are forgotten. Raises StaticError if
        there would be more than `most` different programs.
        """
        if variant.digest is None or variant.digest not in self._digests():
            self._check_count(leaves)
        skeleton = (key, tuple(map(kind_of, leaves)))
        known = self.known.setdefault(skeleton, [])
        same = [v for v in known if v.digest is not None and v.digest == variant.digest]
        for old in same[: max(0, len(same) + 1 - MOST_SETTINGS)]:
            known.remove(old)
            for found in self.exact.values():
                found[:] = [v for v in found if v is not old]
        known.append(variant)
        self.exact.setdefault((skeleton, sizes_of(leaves)), []).append(variant)

    def _digests(self) -> set[str | None]:
        return {v.digest for variants in self.known.values() for v in variants}

    def _check_count(self, leaves: Sequence[Any]) -> None:
        if self.count >= self.most:
            raise StaticError(
                f"a batch of sizes {sizes_of(leaves)}",
                f"{self.count} recorded programs, none of which fits",
                "recording takes time: a model has at most Strategy(max_programs=…) programs",
                "pad batches to few shapes, or use Strategy(max_programs=N) with a larger N",
            )


def fits_sizes(known: Sizes, dynamic: Dynamic, sizes: Sizes) -> bool:
    """True if two batches differ only in dims that are open."""
    open_dims = {(leaf, d) for leaf, dims in dynamic.items() for d in dims}
    return all(at in open_dims for at in differences(known, sizes))


def sizes_of(leaves: Sequence[Any]) -> Sizes:
    """Return the shape of every leaf; () for a leaf that is no tensor."""
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves)


def differences(a: Sizes, b: Sizes) -> list[tuple[int, int]]:
    """Return the pairs (leaf, dim) whose sizes differ."""
    return [(at, d) for at, (x, y) in enumerate(zip(a, b, strict=True)) for d in range(len(x)) if x[d] != y[d]]


def kind_of(x: object) -> object:
    """Return the properties that two leaves must share, beside sizes, to fit one program."""
    if isinstance(x, DistTensor):
        return (x.spec.mesh, x.spec.layout, x.spec.dtype)
    if isinstance(x, Tensor):
        return (x.dim(), x.dtype, x.device)
    return (type(x), x)
