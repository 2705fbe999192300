"""Paths within one mesh, for tensors without product dims.

A path always has the same order, in which each part makes the next one cheaper:

    1. scale terms whose operation changes (avg ↔ sum)
    2. join terms: reduce-scatter over the axes that shard the target, slice further dims, all-reduce the rest
       (or reduce-scatter the rest too, if elements move anyway)
    3. slice, then move: one AllGather if local tensors only grow, else one AllToAll
    4. make terms (fill, pad) and relabel, which cost nothing

`landing` is the layout between 3 and 4: the target without its terms. An axis that is partial in the target may shard
the tensor there, since a shard padded with zeros is a term. This moves less than a whole value on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, groupby, islice, permutations, product

from meshwright.layout import Layout, Spec, axes_of

from ._regions import Cuts, cuts_of
from ._steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    ConversionStep,
    Fill,
    Pad,
    Places,
    ReduceScatter,
    Relabel,
    Scale,
    Slice,
    appended,
)

Term = tuple[str, str]
"""A partial axis and its operation."""
Run = tuple[str, list[str]]
"""An operation and the axes whose terms it joins."""
LINEAR = ("sum", "avg")
MOST_ORDERS = 6


@dataclass(frozen=True, slots=True)
class Manner:
    """Options of a path, between which the price decides.

    `cut_terms`: the dim whose shards, padded with zeros, become new terms; None makes terms of whole values.
    `order`: scatters go axis by axis in this order, gathers in the reverse order; None takes all axes at once.
    `spill`: the dim that is temporarily sharded by axes whose terms become whole, or that shard another dim in the end.
    All terms are then joined by one reduce-scatter, and the following move gathers the shares. None all-reduces them.
    """

    cut_terms: int | None = None
    order: tuple[str, ...] | None = None
    spill: int | None = None


class Trail:
    """A path under construction: the steps so far, and the spec after them."""

    def __init__(self, start: Spec) -> None:
        self.steps: list[ConversionStep] = []
        self.at = start

    def go(self, step: ConversionStep) -> None:
        self.steps.append(step)
        self.at = step.apply(self.at)

    @property
    def cuts(self) -> Cuts:
        return cuts_of(self.at)

    @property
    def free(self) -> set[str]:
        """The axes along which the tensor is replicated."""
        layout = self.at.layout
        return set(self.at.mesh.dim_names) - set(layout.cut_axes) - set(layout.partial_axes)


def find_path(src: Spec, dst: Spec, manner: Manner) -> tuple[ConversionStep, ...]:
    """Return the steps from `src` to `dst` with the given options."""
    trail, target = _begin_trail(src, dst)
    kept = _kept_terms(trail, target)
    landing = _landing(trail.at, target, kept, manner)
    _join_terms(trail, landing, kept, manner)
    _move(trail, landing, manner)
    _make_terms(trail, target)
    _relabel(trail, dst.layout)
    return tuple(trail.steps)


def plain_paths(src: Spec, dst: Spec, all_ways: bool) -> Iterator[tuple[ConversionStep, ...]]:
    """Yield the direct path, and paths with other options that may be cheaper.

    Gathers axis by axis never reduce the bytes of a rank, so they are tried only for a price of the caller
    (`all_ways`). Scatters axis by axis reduce them if shards are uneven.
    """
    direct = find_path(src, dst, Manner())
    yield direct
    moving = [step for step in direct if isinstance(step, Collective | AllToAll)]
    if not moving:
        return
    dims = (None, *range(src.ndim))
    terms = dims if dst.layout.partial and dst.layout.partial != src.layout.partial else (None,)
    joining = any(isinstance(step, ReduceScatter | AllReduce) for step in moving)
    moved = len(moving) > 2 or any(isinstance(step, AllToAll) for step in moving)
    spills = dims if joining and moved and len(moving) > 1 else (None,)
    for manner in map(Manner, *zip(*product(terms, _axis_orders(src, moving, all_ways), spills), strict=True)):
        if manner != Manner():
            yield find_path(src, dst, manner)


def _axis_orders(src: Spec, moving: Sequence[ConversionStep], all_ways: bool) -> list[tuple[str, ...] | None]:
    """Return None (all axes at once), and the orders of axes that keep the order of the axes in every dim."""
    scattered = [s.places for s in moving if isinstance(s, ReduceScatter) and len(s.axes) > 1]
    gathered = [s.places for s in moving if isinstance(s, AllGather) and len(s.places) > 1]
    scatters_pay = all_ways or _has_uneven_scatters(src, moving)
    if not (scattered and scatters_pay) and not (gathered and all_ways):
        return [None]
    nested = [pair for places in scattered + gathered for pair in _nested_axes(places)]
    orders = (order for order in permutations(src.mesh.dim_names) if _keeps_nesting(order, nested))
    return [None, *islice(orders, MOST_ORDERS)]


def _has_uneven_scatters(src: Spec, moving: Sequence[ConversionStep]) -> bool:
    """True if the shards of a scatter may be uneven, and no all-to-all moves elements anyway."""
    uneven = any(n % src.mesh.size for n in src.shape)
    return uneven and not any(isinstance(step, AllToAll) for step in moving)


def _nested_axes(places: Places) -> list[tuple[str, str]]:
    """Return the pairs of axes that shard one dim, the outer axis first."""
    return [(outer, inner) for (outer, d), (inner, e) in combinations(places, 2) if d == e]


def _keeps_nesting(order: tuple[str, ...], nested: Iterable[tuple[str, str]]) -> bool:
    return all(order.index(outer) < order.index(inner) for outer, inner in nested)


def landing_of(src: Spec, dst: Spec, manner: Manner) -> tuple[Spec, tuple[str, ...]]:
    """Return the spec before terms are made, and the axes along which terms are joined before."""
    trail, target = _begin_trail(src, dst)
    kept = _kept_terms(trail, target)
    landing = _landing(trail.at, target, kept, manner)
    joined = tuple(a for a in trail.at.layout.partial_axes if a not in kept)
    return src.with_layout(Layout(landing)), joined


def _begin_trail(src: Spec, dst: Spec) -> tuple[Trail, Spec]:
    """Return a trail from `src`, and the target, both without axes of size one."""
    trail = Trail(src)
    lone = {a for a, n in src.mesh.sizes.items() if n == 1}
    _relabel(trail, _without_axes(src.layout, lone))
    return trail, dst.with_layout(_without_axes(dst.layout, lone))


def _relabel(trail: Trail, layout: Layout) -> None:
    if layout == trail.at.layout:
        return
    if trail.steps and isinstance(trail.steps[-1], Relabel):
        trail.steps.pop()
    trail.go(Relabel(layout))


def _without_axes(layout: Layout, axes: set[str]) -> Layout:
    """Return the layout without axes of size one, on which all placements are equal."""
    if not axes.intersection(layout.axes):
        return layout
    dims = tuple(tuple(a for a in axes_of(dim) if a not in axes) for dim in layout.dims)
    partial = tuple((a, op) for a, op in layout.partial if a not in axes)
    return Layout(dims, partial, tuple(a for a in layout.varying if a not in axes))


def _kept_terms(trail: Trail, target: Spec) -> set[str]:
    """Return the axes that stay partial, after scaling terms whose operation changes between sum and avg.

    Operations that do not commute (a sum of maxima is no maximum of sums) must be joined in the order of the layout, so
    no axis stays partial then.
    """
    have, want = dict(trail.at.layout.partial), dict(target.layout.partial)
    if have == want:
        return set(have)
    if not _commute([*have.values(), *want.values()]):
        return set()
    exact = trail.at.dtype.is_floating_point or trail.at.dtype.is_complex
    for op in LINEAR:
        axes = tuple(a for a in have if want.get(a, have[a]) != have[a] and want.get(a) == op and exact)
        if axes:
            trail.go(Scale(axes, op))
    return {a for a, op in trail.at.layout.partial if want.get(a) == op}


def _commute(ops: Iterable[str]) -> bool:
    """True if terms of these operations may be joined in any order: one operation, or sums and averages."""
    return len({"sum" if op in LINEAR else op for op in ops}) <= 1


def _landing(at: Spec, target: Spec, kept: set[str], manner: Manner) -> Cuts:
    """Return the sharding before terms are made: the target's, plus axes that become partial by padding."""
    landing = list(cuts_of(target))
    made = padded_axes(target) - kept
    for dim, axes in enumerate(cuts_of(at)):
        landing[dim] += tuple(a for a in axes if a in made)
    left = tuple(a for a in target.mesh.dim_names if a in made and a not in at.layout.cut_axes)
    if manner.cut_terms is not None:
        landing[manner.cut_terms] += left
    return tuple(landing)


def padded_axes(target: Spec) -> set[str]:
    """Return the axes whose new terms may be shards padded with zeros.

    The shards of a mean are scaled by the number of ranks. The neutral terms of a product are ones, and this scaling
    would change them. If the layout has a product too, every rank's term of the mean is therefore the whole value.
    """
    partial = target.layout.partial
    exact = target.dtype.is_floating_point or target.dtype.is_complex
    scalable = exact and _commute(op for _, op in partial)
    return {a for a, op in partial if op == "sum" or (op == "avg" and scalable)}


def _join_terms(trail: Trail, landing: Cuts, kept: set[str], manner: Manner) -> None:
    """Join the terms along all axes but `kept`: by reduce-scatters, or by all-reduces along axes that shard nothing."""
    terms = [(a, op) for a, op in trail.at.layout.partial if a not in kept]
    if not terms:
        return
    target = _joined_cuts(trail, landing, {a for a, _ in terms}, manner.spill)
    scattered = set(chain(*target))
    for op, axes in _joins(terms, scattered):
        if axes[0] in scattered:
            _scatter(trail, target, op, axes, manner.order)
        else:
            _add_slice(trail, landing)
            trail.go(AllReduce(tuple(axes), op))


def _joined_cuts(trail: Trail, landing: Cuts, terms: set[str], spill: int | None) -> Cuts:
    """Return the sharding after terms are joined: axes of `landing` that can follow the present ones, then others."""
    places = _joined_places(trail, landing, terms)
    if spill is not None:
        landed = _all_places(landing)
        spilled = [a for a in trail.at.mesh.dim_names if a in terms and a not in dict(landed)]
        spilled += [a for a, d in landed if a in trail.free and (a, d) not in places]
        places += tuple((a, spill) for a in spilled)
    return appended(trail.cuts, places)


def _joined_places(trail: Trail, target: Cuts, terms: set[str]) -> Places:
    """Return the places of `target` that are reached by joining `terms`, also where another axis belongs before."""
    ahead = _places_ahead(trail.cuts, target, trail.free | terms)
    return (*ahead, *[(a, d) for a, d in _all_places(target) if a in terms and (a, d) not in ahead])


def _joins(terms: list[Term], scattered: set[str]) -> list[Run]:
    """Return the axes of each joining step, with their operation; scatters come before all-reduces if all commute."""
    joins: list[Run] = []
    for op, axes in _runs_of_terms(terms):
        joins.append((op, [a for a in axes if a in scattered]))
        joins.append((op, [a for a in axes if a not in scattered]))
    joins = [(op, axes) for op, axes in joins if axes]
    if _commute(op for op, _ in joins):
        joins.sort(key=lambda join: join[1][0] not in scattered)
    return joins


def _runs_of_terms(terms: list[Term]) -> list[Run]:
    """Return runs of axes with equal operations, in order; operations that commute are sorted before."""
    if _commute(op for _, op in terms):
        terms = sorted(terms, key=lambda term: term[1])
    return [(op, [a for a, _ in run]) for op, run in groupby(terms, key=lambda term: term[1])]


def _scatter(trail: Trail, target: Cuts, op: str, axes: list[str], order: tuple[str, ...] | None) -> None:
    """Reduce-scatter the terms along `axes`, which shard the result; further dims are sliced in the same step."""
    axes = sorted(axes, key=(order or [*chain(*target)]).index)
    for together in [axes] if order is None else [[axis] for axis in axes]:
        trail.go(ReduceScatter(tuple(together), _joined_places(trail, target, set(together)), op))


def _all_places(cuts: Cuts) -> Places:
    """Return all (axis, dim) pairs of a sharding."""
    return tuple((axis, dim) for dim, axes in enumerate(cuts) for axis in axes)


def _places_ahead(cuts: Cuts, landing: Cuts, allowed: Iterable[str]) -> Places:
    """Return the (axis, dim) pairs of `landing` that can be added now, after the axes that already shard each dim."""
    places: list[tuple[str, int]] = []
    for dim, (have, want) in enumerate(zip(cuts, landing, strict=True)):
        if want[: len(have)] != have:
            continue
        for axis in want[len(have) :]:
            if axis not in allowed:
                break
            places.append((axis, dim))
    return tuple(places)


def _add_slice(trail: Trail, landing: Cuts) -> None:
    places = _places_ahead(trail.cuts, landing, trail.free)
    if places:
        trail.go(Slice(places))


def _move(trail: Trail, landing: Cuts, manner: Manner) -> None:
    _add_slice(trail, landing)
    have = trail.cuts
    if have == landing:
        return
    if any(a[: len(b)] != b for a, b in zip(have, landing, strict=True)):
        trail.go(AllToAll(landing))
        return
    stays = _all_places(landing)
    places = tuple(place for place in _all_places(have) if place not in stays)
    order = manner.order
    if order is None:
        trail.go(AllGather(places))
        return
    for place in sorted(places, key=lambda place: order.index(place[0]), reverse=True):
        trail.go(AllGather((place,)))


def _make_terms(trail: Trail, target: Spec) -> None:
    """Add fill and pad steps; products come before sums, since a term 1 of a product must not be summed."""
    layout = trail.at.layout
    new = [(a, op) for a, op in target.layout.partial if a not in layout.partial_axes]
    filled = [(a, op) for a, op in new if a not in layout.cut_axes]
    for op, axes in _runs_of_terms(sorted(filled, key=lambda term: (term[1] == "sum", term[1]))):
        trail.go(Fill(tuple(axes), op))
    _pad_shards(trail, dict(new))


def _pad_shards(trail: Trail, terms: dict[str, str]) -> None:
    """Add the steps that turn the shards along the axes in `terms` into terms of sums and averages."""
    places = tuple((a, d) for a, d in _all_places(trail.cuts) if a in terms)
    if not places:
        return
    trail.go(Pad(places))
    averaged = tuple(a for a, _ in places if terms[a] == "avg")
    if averaged:
        trail.go(Scale(averaged, "avg"))
