"""Execution of a plan: each step becomes one function of local tensor and communicator, built once per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from meshwright.layout import Range, Spec

from ._regions import Box, box_of, index, volume
from ._routes import Route, Routes, routes
from ._steps import (
    AllGather,
    AllReduce,
    AllToAll,
    ConversionStep,
    Exchange,
    Fill,
    Pad,
    ReduceScatter,
    Relabel,
    Scale,
    Slice,
    View,
    made,
)

Group = tuple[int, ...]
Shape = tuple[int, ...]


class Mover(Protocol):
    """Protocol of a communicator: the five collectives that a plan needs.

    Tensors may be empty or not contiguous; results are new, contiguous tensors.
    """

    rank: int

    def all_reduce(self, x: Tensor, op: str, group: Group) -> Tensor: ...

    def all_gather(self, x: Tensor, group: Group, shapes: Sequence[Shape]) -> list[Tensor]: ...

    def reduce_scatter(self, pieces: Sequence[Tensor], op: str, group: Group) -> Tensor: ...

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Shape], group: Group) -> list[Tensor]: ...

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype, torch.device]],
        group: Group,
    ) -> list[Tensor]: ...


Action = Callable[[Tensor, Mover], Tensor]
Part = Callable[[Tensor], Tensor]
Join = Callable[[list[Tensor], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Act:
    """Action of one rank for one step. `fresh` is True if the result shares no storage with the operand."""

    run: Action
    fresh: bool = True


def compile_step(step: ConversionStep, x: Spec, rank: int) -> Act | None:
    """Return the action of `rank` for `step` on its local tensor of `x`; None if there is nothing to do."""
    if isinstance(step, Exchange):
        return _exchange(step, x, rank)
    if rank not in x.mesh:
        return None
    return _ACTS[type(step)](step, x, rank)


def _nothing(step: Relabel, x: Spec, rank: int) -> Act | None:
    return None


def _view(step: View, x: Spec, rank: int) -> Act | None:
    shape = step.to.local_shape(rank)
    return Act(lambda t, c: t.reshape(shape), fresh=False)


def _slice(step: Slice, x: Spec, rank: int) -> Act | None:
    take = _take_box(box_of(made(step, x), rank), box_of(x, rank))
    return Act(lambda t, c: take(t), fresh=False)


def _scale(step: Scale, x: Spec, rank: int) -> Act | None:
    n = prod(x.mesh.sizes[a] for a in step.axes)
    if step.op == "sum":
        return Act(lambda t, c: t / n)
    return Act(lambda t, c: t * n)


def _fill(step: Fill, x: Spec, rank: int) -> Act | None:
    at = x.mesh.coordinate(rank)
    if step.op not in ("sum", "prod"):
        return None
    if not any(at[a] for a in step.axes):
        return Act(lambda t, c: t, fresh=False)
    neutral = torch.zeros_like if step.op == "sum" else torch.ones_like
    return Act(lambda t, c: neutral(t))


def _pad(step: Pad, x: Spec, rank: int) -> Act | None:
    whole = made(step, x)
    shape, where = whole.local_shape(rank), index(box_of(x, rank), box_of(whole, rank))

    def run(t: Tensor, c: Mover) -> Tensor:
        out = t.new_zeros(shape)
        out[where] = t
        return out

    return Act(run)


def _all_reduce(step: AllReduce, x: Spec, rank: int) -> Act | None:
    op, group = step.op, step.group(x, rank)
    return Act(lambda t, c: c.all_reduce(t, op, group))


def _all_gather(step: AllGather, x: Spec, rank: int) -> Act | None:
    group = step.group(x, rank)
    shapes = [x.local_shape(r) for r in group]
    join = _assembly([box_of(x, r) for r in group], box_of(made(step, x), rank))
    return Act(lambda t, c: join(c.all_gather(t, group, shapes), t))


def _reduce_scatter(step: ReduceScatter, x: Spec, rank: int) -> Act | None:
    op, group = step.op, step.group(x, rank)
    cut = _take_boxes([box_of(made(step, x), r) for r in group], box_of(x, rank))
    return Act(lambda t, c: c.reduce_scatter(cut(t), op, group))


def _all_to_all(step: AllToAll, x: Spec, rank: int) -> Act | None:
    group, held = step.group(x, rank), box_of(x, rank)
    found = routes(x, made(step, x), group)
    arrivals, kept = _arrivals(found, rank)
    incoming, outgoing = dict(arrivals), dict(found.sends(rank))
    join = _assembly([*incoming.values(), *kept], box_of(made(step, x), rank))
    senders = [group.index(r) for r in incoming]
    takes = [_take_box(outgoing[r], held) if r in outgoing else None for r in group]
    keeps = [_take_box(box, held) for box in kept]
    shapes = [_shape(incoming[r]) if r in incoming else (0,) for r in group]
    silent = found.silent

    def run(t: Tensor, c: Mover) -> Tensor:
        parts: list[Tensor] = []
        if not silent:
            none = t.new_empty((0,))
            arrived = c.all_to_all([none if take is None else take(t) for take in takes], shapes, group)
            parts = [arrived[i] for i in senders]
        return join([*parts, *[keep(t) for keep in keeps]], t)

    return Act(run, fresh=not kept or len(incoming) > 0)


def _arrivals(found: Routes, rank: int) -> tuple[list[Route], list[Box]]:
    """Return the routes to `rank` from other ranks, and the boxes that it holds itself."""
    received = found.receives(rank)
    return [(r, box) for r, box in received if r != rank], [box for r, box in received if r == rank]


@dataclass(frozen=True, slots=True)
class Halves:
    """Both halves of an exchange on one rank: parts that it sends and keeps, and the assembly of its new local tensor.

    `expected` are the sending peers with the shapes of their parts, in the order of the arguments of `join`; the parts
    that the rank keeps (`kept`) come after them.
    """

    outgoing: tuple[tuple[int, Part], ...]
    expected: tuple[tuple[int, Shape], ...]
    kept: tuple[Part, ...]
    join: Join
    group: Group
    silent: bool


def halves_of(step: Exchange, x: Spec, rank: int) -> Halves | None:
    """Return the parts that `rank` sends and receives in an exchange of a tensor with spec `x`, or None."""
    group = step.group(x, rank)
    if rank not in group:
        return None
    found = routes(x, step.to, group)
    held, need = box_of(x, rank), box_of(step.to, rank)
    if found.silent and held == need:
        return None
    incoming, kept = _arrivals(found, rank)
    leaving = rank not in step.to.mesh
    return Halves(
        tuple((r, _take_box(box, held)) for r, box in found.sends(rank)),
        tuple((r, _shape(box)) for r, box in incoming),
        tuple(_take_box(box, held) for box in kept),
        _empty_result(step.to.local_shape(rank)) if leaving else _assembly([b for _, b in incoming] + kept, need),
        group,
        found.silent,
    )


def _exchange(step: Exchange, x: Spec, rank: int) -> Act | None:
    do = halves_of(step, x, rank)
    if do is None:
        return None

    def run(t: Tensor, c: Mover) -> Tensor:
        parts: list[Tensor] = []
        if not do.silent:
            receives = [(r, shape, t.dtype, t.device) for r, shape in do.expected]
            parts = c.exchange([(r, take(t)) for r, take in do.outgoing], receives, do.group)
        return do.join([*parts, *[take(t) for take in do.kept]], t)

    return Act(run, fresh=len(do.kept) == 0 or len(do.expected) > 0)


def _empty_result(shape: Shape) -> Join:
    return lambda parts, t: away_part(shape, t.dtype, t.device)


def away_part(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the local tensor of a rank outside the mesh: it has no elements, or a dummy element if it has no dims.

    torch converts a tensor to a number only if it has one element. The dummy is NaN or the lowest integer, so that a
    call that reads it by mistake is noticed.
    """
    if 0 in shape or dtype is torch.bool:
        return torch.empty(shape, dtype=dtype, device=device)
    least = torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
    return torch.full(shape, least, dtype=dtype, device=device)


def _take_box(box: Box, held: Box) -> Part:
    """Return a function that takes `box` as a view out of a tensor that holds the box `held`."""
    cut = _cut_dims([box], held)
    if not cut:
        return lambda t: t
    if len(cut) == 1:
        (dim,) = cut
        start, length = box[dim][0] - held[dim][0], box[dim][1]
        return lambda t: t.narrow(dim, start, length)
    where = index(box, held)
    return lambda t: t[where]


def _take_boxes(boxes: Sequence[Box], held: Box) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function that takes all boxes out of a tensor that holds `held`; adjacent boxes need one `split`."""
    cut = _cut_dims(boxes, held)
    if len(cut) == 1 and _are_adjacent([box[cut[0]] for box in boxes], held[cut[0]]):
        (dim,) = cut
        sizes = [box[dim][1] for box in boxes]
        return lambda t: t.split(sizes, dim)
    takes = [_take_box(box, held) for box in boxes]
    return lambda t: [take(t) for take in takes]


def _cut_dims(boxes: Sequence[Box], whole: Box) -> list[int]:
    """Return the dims along which some box is only a part of `whole`."""
    return [dim for dim, extent in enumerate(whole) if any(box[dim] != extent for box in boxes)]


def _are_adjacent(ranges: Sequence[Range], whole: Range) -> bool:
    """True if the ranges follow each other without gaps, from the start to the end of `whole`."""
    ends = list(accumulate((length for _, length in ranges), initial=whole[0]))
    return [start for start, _ in ranges] == ends[:-1] and ends[-1] == sum(whole)


def _shape(box: Box) -> Shape:
    return tuple([n for _, n in box])


def _assembly(boxes: Sequence[Box], target: Box) -> Join:
    """Return a function that assembles parts with the given `boxes` to `target`, by one `cat` if possible."""
    full = [i for i, box in enumerate(boxes) if volume(box)]
    if not full:
        return _empty_result(_shape(target))
    if len(full) == 1:
        (only,) = full
        return lambda parts, t: parts[only]
    cut = _cut_dims([boxes[i] for i in full], target)
    return _concatenation(boxes, full, cut[0]) if len(cut) == 1 else _copies(boxes, full, target)


def _concatenation(boxes: Sequence[Box], full: Sequence[int], dim: int) -> Join:
    """Return a function that concatenates the parts with indices `full` along a dim, in the order of their boxes."""
    order = sorted(full, key=lambda i: boxes[i][dim])
    if order == list(range(len(boxes))):
        return lambda parts, t: torch.cat(parts, dim)
    return lambda parts, t: torch.cat([parts[i] for i in order], dim)


def _copies(boxes: Sequence[Box], full: Sequence[int], target: Box) -> Join:
    """Return a function that copies the parts with indices `full` into a new tensor, each to its box."""
    shape = _shape(target)
    places = [(i, index(boxes[i], target)) for i in full]

    def copy(parts: list[Tensor], t: Tensor) -> Tensor:
        out = t.new_empty(shape)
        for i, where in places:
            out[where] = parts[i]
        return out

    return copy


_ACTS: dict[type[ConversionStep], Callable[..., Act | None]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    AllToAll: _all_to_all,
    Fill: _fill,
    Pad: _pad,
    ReduceScatter: _reduce_scatter,
    Relabel: _nothing,
    Scale: _scale,
    Slice: _slice,
    View: _view,
}


def compile_plan(steps: Sequence[ConversionStep], specs: Sequence[Spec], rank: int) -> tuple[Action, ...]:
    """Return the actions of `rank` in order. If needed, the last one copies the result or makes it contiguous."""
    acts: list[Action] = []
    shared, strided, worked = True, False, False
    for step, x in zip(steps, specs, strict=False):
        act = compile_step(step, x, rank)
        if act is None:
            continue
        acts.append(act.run)
        worked = worked or not isinstance(step, View)
        shared = shared and not act.fresh
        strided = not act.fresh and (strided or not isinstance(step, View))
    src, dst = specs[0], specs[-1]
    if rank not in dst.mesh:
        return _leaving_actions(acts, dst.local_shape(rank)) if src is not dst else ()
    if not worked:
        return _reshaped(src.local_shape(rank), dst.local_shape(rank))
    if shared:
        acts.append(_copy)
    elif strided:
        acts.append(_contiguous)
    return tuple(acts)


def _leaving_actions(acts: list[Action], shape: Shape) -> tuple[Action, ...]:
    return (*acts, lambda t, c: t if shape and t.shape == shape else away_part(shape, t.dtype, t.device))


def _reshaped(before: Shape, after: Shape) -> tuple[Action, ...]:
    return () if before == after else (lambda t, c: t.reshape(after),)


def _copy(t: Tensor, c: Mover) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _contiguous(t: Tensor, c: Mover) -> Tensor:
    return t.contiguous()
