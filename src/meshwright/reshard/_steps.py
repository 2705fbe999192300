"""Steps: the elementary conversions, as values.

Each step computes the resulting spec and the bytes that a rank receives. The execution of steps is in `_execute.py`.
The type of a tensor along one mesh axis (S sharded, R replicated, P partial) changes by

    S → R   AllGather        R → S   Slice           S → S'  AllToAll
    P → R   AllReduce        R → P   Fill            P → S   ReduceScatter      S → P   Pad
    R → R   Relabel          sum ↔ avg  Scale        mesh → mesh  Exchange      factors  View

and the transpose of the step A → B is the step dual(B) → dual(A), which is in the same table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod

from meshwright.layout import PARTIAL_OPS, Layout, Spec

from ._regions import Cuts, cuts_of, lacking
from ._routes import routes

Places = tuple[tuple[str, int], ...]
"""(axis, dim) pairs: axes that start or stop to shard a dim, outermost first."""


class ConversionStep(ABC):
    """One step of a plan, which maps a spec to a spec."""

    __slots__ = ()

    @abstractmethod
    def apply(self, x: Spec) -> Spec:
        """Return the spec of the result for the operand `x`."""

    def received(self, x: Spec, rank: int) -> int:
        """Return the bytes that `rank` receives from others if the step is applied to `x`."""
        return 0

    def rounds(self, x: Spec) -> int:
        """Return 1 if ranks must communicate, 0 if the step is local."""
        return 0

    def group(self, x: Spec, rank: int) -> tuple[int, ...]:
        """Return the ranks that run the step together with `rank`."""
        return (rank,)


@lru_cache(maxsize=2048)
def made(step: ConversionStep, x: Spec) -> Spec:
    """Return `step.apply(x)`, cached."""
    return step.apply(x)


class Collective(ConversionStep):
    """A step in which the ranks along some axes communicate."""

    __slots__ = ()

    def rounds(self, x: Spec) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Slice(ConversionStep):
    """R → S: each rank keeps its shard. Transpose: AllGather of a gradient that is equal on all ranks, or Pad.

    >>> Slice((("dp", 0), ("tp", 0), ("ep", 1)))
    Slice(dp tp, dim 0; ep, dim 1)
    """

    places: Places

    def apply(self, x: Spec) -> Spec:
        return _with_cuts(x, appended(cuts_of(x), self.places))

    def __repr__(self) -> str:
        return f"Slice({_places_text(self.places)})"


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """S → R: every rank receives the other ranks' shards. Transpose: ReduceScatter, or Slice.

    >>> AllGather((("tp", 0),))
    AllGather(tp, dim 0)
    """

    places: Places

    def apply(self, x: Spec) -> Spec:
        return _with_cuts(x, _without_places(cuts_of(x), self.places))

    def received(self, x: Spec, rank: int) -> int:
        return (_local_numel(made(self, x), rank) - _local_numel(x, rank)) * x.dtype.itemsize

    def group(self, x: Spec, rank: int) -> tuple[int, ...]:
        return x.mesh.group(rank, [a for a, _ in self.places])

    def __repr__(self) -> str:
        return f"AllGather({_places_text(self.places)})"


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """P → S: each rank receives the joined terms of its shard. Transpose: AllGather.

    `places` may also name axes that only slice; they cost nothing. `op` joins the terms along `axes`.
    """

    axes: tuple[str, ...]
    places: Places
    op: str = "sum"

    def apply(self, x: Spec) -> Spec:
        return _with_cuts(_without_terms(x, self.axes), appended(cuts_of(x), self.places))

    def received(self, x: Spec, rank: int) -> int:
        return (_rank_count(x, self.axes) - 1) * _local_numel(made(self, x), rank) * x.dtype.itemsize

    def group(self, x: Spec, rank: int) -> tuple[int, ...]:
        return x.mesh.group(rank, self.axes)

    def __repr__(self) -> str:
        notes = f" over {_terms_text(self.axes, self.op)}"
        if self.axes == tuple(a for a, _ in self.places):
            notes = "" if self.op == "sum" else f" {self.op}"
        return f"ReduceScatter({_places_text(self.places)}{notes})"


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """P → R: every rank receives the joined terms. Transpose: the identity, R invariant → R varying."""

    axes: tuple[str, ...]
    op: str = "sum"

    def apply(self, x: Spec) -> Spec:
        return _without_terms(x, self.axes)

    def received(self, x: Spec, rank: int) -> int:
        n = _rank_count(x, self.axes)
        return -(-2 * (n - 1) * _local_numel(x, rank) * x.dtype.itemsize // n)

    def group(self, x: Spec, rank: int) -> tuple[int, ...]:
        return x.mesh.group(rank, self.axes)

    def __repr__(self) -> str:
        return f"AllReduce({_terms_text(self.axes, self.op)})"


@dataclass(frozen=True, slots=True)
class AllToAll(ConversionStep):
    """S → S': each rank receives the elements that it lacks, for any axes and dims. Transpose: AllToAll.

    >>> AllToAll((("tp",), ()))
    AllToAll([@tp, :])
    """

    cuts: Cuts

    def apply(self, x: Spec) -> Spec:
        return _with_cuts(x, self.cuts)

    def received(self, x: Spec, rank: int) -> int:
        return lacking(made(self, x), x, rank) * x.dtype.itemsize

    def rounds(self, x: Spec) -> int:
        return int(any(self.received(x, rank) for rank in x.mesh.process_ids))

    def group(self, x: Spec, rank: int) -> tuple[int, ...]:
        changed = changed_axes(cuts_of(x), self.cuts)
        return x.mesh.group(rank, [a for a in x.mesh.dim_names if a in changed])

    def __repr__(self) -> str:
        return f"AllToAll({Layout(self.cuts)!r})"


@dataclass(frozen=True, slots=True)
class Fill(ConversionStep):
    """R → P: the value becomes one term; all other terms are neutral. Transpose: R varying → R, the identity."""

    axes: tuple[str, ...]
    op: str = "sum"

    def apply(self, x: Spec) -> Spec:
        return _with_terms(x, [(a, self.op) for a in self.axes])

    def __repr__(self) -> str:
        return f"Fill({_terms_text(self.axes, self.op)})"


@dataclass(frozen=True, slots=True)
class Pad(ConversionStep):
    """S → P(sum): each rank's shard becomes a term, padded with zeros. Transpose: Slice."""

    places: Places

    def apply(self, x: Spec) -> Spec:
        whole = _with_cuts(x, _without_places(cuts_of(x), self.places))
        return _with_terms(whole, [(a, "sum") for a, _ in self.places])

    def __repr__(self) -> str:
        return f"Pad({_places_text(self.places)})"


@dataclass(frozen=True, slots=True)
class Scale(ConversionStep):
    """P(avg) → P(sum) or back: each rank scales its term."""

    axes: tuple[str, ...]
    op: str

    def apply(self, x: Spec) -> Spec:
        return _with_terms(x, [(a, self.op) for a in self.axes])

    def __repr__(self) -> str:
        return f"Scale({' '.join(self.axes)} to {self.op})"


@dataclass(frozen=True, slots=True)
class Relabel(ConversionStep):
    """Same local tensors with another layout: R varying ↔ R invariant, and any type on an axis of size one."""

    layout: Layout

    def apply(self, x: Spec) -> Spec:
        return x.with_layout(self.layout)

    def __repr__(self) -> str:
        return f"Relabel({self.layout!r})"


@dataclass(frozen=True, slots=True)
class View(ConversionStep):
    """Same local elements with dims split into their factors, or merged again."""

    to: Spec

    def apply(self, x: Spec) -> Spec:
        return self.to

    def __repr__(self) -> str:
        return f"View({self.to!r})"


@dataclass(frozen=True, slots=True)
class Exchange(ConversionStep):
    """From one mesh to another: every element that a rank lacks is sent to it once. Transpose: Exchange."""

    to: Spec

    def apply(self, x: Spec) -> Spec:
        return self.to

    def received(self, x: Spec, rank: int) -> int:
        return lacking(self.to, x, rank) * x.dtype.itemsize

    def rounds(self, x: Spec) -> int:
        return int(not routes(x, self.to, self.group(x, 0)).silent)

    def group(self, x: Spec, rank: int) -> tuple[int, ...]:
        return tuple(sorted({*x.mesh.process_ids, *self.to.mesh.process_ids}))

    def __repr__(self) -> str:
        return f"Exchange({self.to!r} on {self.to.mesh!r})"


def changed_axes(src: Cuts, dst: Cuts) -> set[str]:
    """Return the axes that do not shard the same dim after the same outer axes on both sides."""
    changed: set[str] = set()
    for a, b in zip(src, dst, strict=True):
        same = 0
        while same < min(len(a), len(b)) and a[same] == b[same]:
            same += 1
        changed.update(a[same:], b[same:])
    return changed


def appended(cuts: Cuts, places: Places) -> Cuts:
    """Return the sharding with the axes of `places` added as the innermost axes of their dims."""
    made = list(cuts)
    for axis, dim in places:
        made[dim] = (*made[dim], axis)
    return tuple(made)


def _without_places(cuts: Cuts, places: Places) -> Cuts:
    made = list(cuts)
    for axis, dim in reversed(places):
        if made[dim][-1:] != (axis,):
            raise ValueError(f"{axis!r} is not the innermost axis that shards dim {dim} of {Layout(cuts)!r}")
        made[dim] = made[dim][:-1]
    return tuple(made)


def _with_cuts(x: Spec, cuts: Cuts) -> Spec:
    cut = {a for axes in cuts for a in axes}
    varying = tuple(a for a in x.layout.varying if a not in cut)
    return x.with_layout(Layout(cuts, x.layout.partial, varying))


def _with_terms(x: Spec, terms: Iterable[tuple[str, str]]) -> Spec:
    partial = dict(x.layout.partial) | dict(terms)
    varying = tuple(a for a in x.layout.varying if a not in partial)
    return x.with_layout(Layout(x.layout.dims, tuple(partial.items()), varying))


def _without_terms(x: Spec, axes: tuple[str, ...]) -> Spec:
    left = tuple((a, op) for a, op in x.layout.partial if a not in axes)
    return x.with_layout(replace(x.layout, partial=left))


def _local_numel(x: Spec, rank: int) -> int:
    return prod(x.local_shape(rank))


def _rank_count(x: Spec, axes: Iterable[str]) -> int:
    return prod(x.mesh.sizes[a] for a in axes)


def _places_text(places: Places) -> str:
    runs = groupby(places, key=lambda place: place[1])
    return "; ".join(f"{' '.join(axis for axis, _ in run)}, dim {dim}" for dim, run in runs)


def _terms_text(axes: tuple[str, ...], op: str) -> str:
    """Return the text of axes and operation. "sum" is omitted unless the last axis has the name of an operation."""
    plain = op == "sum" and (not axes or axes[-1] not in PARTIAL_OPS)
    return " ".join(axes if plain else (*axes, op))
