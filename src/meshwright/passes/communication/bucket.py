"""Bucketing of small collectives: several tensors are packed into one row, sent at once, and unpacked.

For small tensors, the start of a collective takes longer than the transfer. The collectives of a bucket are the same
step along the same axes of one mesh, on different tensors. Other axes do not matter to the step, so any local tensors
can share a row. The order of additions does not change.

A bucket is placed after the producers of its operands and before the first reader of its results; only views are moved
for it. So gradients are reduced during the backward pass, once the last one of a bucket is available, and parameters
are gathered before the first of them is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile
from math import prod
from typing import ClassVar

import torch

from meshwright.cost import device_of, link_of
from meshwright.graph import Change, Conversion, Draft, Op, Origin, Pass, Program, Spot, Value, is_view, register_pass
from meshwright.layout import Spec, hint
from meshwright.reshard import AllGather, AllReduce, ReduceScatter

from .._rows import has_equal_shards, has_static_sizes, origin_text, row_spec

aten = torch.ops.aten
MIB = 2**20


@register_pass
@dataclass(frozen=True)
class Bucket(Pass):
    """Merge equal collectives on different tensors into one, up to `bytes` of operands or results (the larger of both).

    Merged are all-reduces, reduce-scatters and all-gathers of one phase, mesh, dtype and operation, along the same
    axes. Results that are needed in the same phase and results that are needed in a later phase have separate buckets.
    If a local tensor has different shapes on different ranks, the program is unchanged: such ranks have programs of
    their own, and the order of collectives could differ between them.

    A tensor of more than `alone` bytes is not bucketed, because packing takes longer than starting a collective. If
    `alone` is None, the cost model computes this size for the device.

    >>> Bucket()
    Bucket(bytes=26214400, alone=None)
    """

    name: ClassVar[str] = "bucket"
    keeps_sums: ClassVar[bool] = True
    bytes: int = 25 * MIB
    alone: int | None = None

    def run(self, program: Program) -> Program:
        if not all(_has_equal_shards(node.op) for node in program.nodes):
            return program
        draft = Draft(program)
        changes: list[Change] = []
        waiting = list(filter(self._is_small, draft))
        order: dict[Spot, int] = {}
        while len(waiting) > 1:
            order = order or {spot: at for at, spot in enumerate(draft)}
            members, window = self._first(draft, waiting, order)
            spots = [member.spot for member in members]
            if len(spots) > 1:
                changes.append(_fuse(draft, spots, window, order))
                order = {}
            taken = set(spots)
            waiting = [spot for spot in waiting if spot not in taken]
        return draft.finish(*changes) if changes else program

    def _is_small(self, spot: Spot) -> bool:
        """True for a collective that may join others, and is not too large for it."""
        if not _can_join(spot):
            return False
        alone = break_even_bytes(spot.ins[0].device) if self.alone is None else self.alone
        return _row_bytes(spot) <= min(self.bytes, alone)

    def _first(
        self, draft: Draft, waiting: Sequence[Spot], order: dict[Spot, int]
    ) -> tuple[list[BucketMember], PlacementWindow]:
        """Return the bucket of the first waiting collective, and the positions where it may be placed."""
        first = _member(draft, waiting[0], order)
        members, window, size = [first], first.window, _row_bytes(first.spot)
        for spot in waiting[1:]:
            if _kind(spot) != first.kind:
                continue
            member = _member(draft, spot, order)
            if member.is_urgent != first.is_urgent:
                continue
            both = window.and_(member.window)
            size += _row_bytes(spot)
            if both is None or size > self.bytes or {m.spot for m in members} & {*member.makers}:
                break
            members.append(member)
            window = both
        return members, window


@lru_cache(maxsize=64)
def break_even_bytes(device: str) -> int:
    """Return the number of bytes that are read and written in the start time of a collective, on a CPU or an H100.

    On a CPU it is that of Gloo, because a program does not know whether its ranks will share memory.
    """
    kind, link = ("cpu core", "Gloo on one host") if device == "cpu" else ("H100", "NVLink4")
    found = link_of(link)
    return int((found.start + found.latency) * device_of(kind).bandwidth / 2)


@dataclass(frozen=True, slots=True)
class PlacementWindow:
    """Positions where a collective may be placed: before a node from `ready` to `due`.

    `at` is the original position, of the first one for several collectives.
    """

    ready: int
    due: int
    at: int

    def and_(self, other: PlacementWindow) -> PlacementWindow | None:
        """Return the positions where both may be placed together; None if there are none."""
        both = PlacementWindow(max(self.ready, other.ready), min(self.due, other.due), min(self.at, other.at))
        return both if both.position <= both.due else None

    @property
    def position(self) -> int:
        return max(self.ready, self.at)


@dataclass(frozen=True, slots=True)
class BucketMember:
    """A collective that may join a bucket.

    `makers` are the nodes that produce its operand, views left out. `is_urgent` is True if a node of the same phase
    reads its result.
    """

    spot: Spot
    kind: Hashable
    window: PlacementWindow
    makers: tuple[Spot, ...]
    is_urgent: bool


def _member(draft: Draft, spot: Spot, order: dict[Spot, int]) -> BucketMember:
    makers = tuple(s for s in _producers(draft, spot) if not is_view(s.op))
    users = [s for s in _readers(draft, spot) if not is_view(s.op)]
    ready = max((order[s] + 1 for s in makers), default=0)
    due = min((order[s] for s in users), default=len(order))
    urgent = any(s.origin.phase == spot.origin.phase for s in users)
    return BucketMember(spot, _kind(spot), PlacementWindow(ready, due, order[spot]), makers, urgent)


def _producers(draft: Draft, spot: Spot) -> Iterator[Spot]:
    """Return the producers of a node's operands; for a view, also the producers of its base."""
    seen: dict[Spot, None] = {}
    waiting = [spot]
    while waiting:
        for v in waiting.pop().ins:
            maker = draft.producer(v)
            if maker is not None and maker not in seen:
                seen[maker] = None
                if is_view(maker.op):
                    waiting.append(maker)
    return iter(seen)


def _readers(draft: Draft, spot: Spot) -> Iterator[Spot]:
    """Return the readers of a node's results; for a view, also the readers of the view."""
    seen: dict[Spot, None] = {}
    waiting = [spot]
    while waiting:
        for v in waiting.pop().outs:
            for user in draft.users(v):
                if user not in seen:
                    seen[user] = None
                    if is_view(user.op):
                        waiting.append(user)
    return iter(seen)


def _origin_of(spots: Sequence[Spot]) -> Origin:
    """Return an origin for all of the nodes: their common module path, and the source line if it is equal for all."""
    origin, layers = spots[-1].origin, [spot.origin.layer.split(".") for spot in spots]
    shared = takewhile(lambda names: len({*names}) == 1, zip(*layers, strict=False))
    same = all(spot.origin.where == origin.where for spot in spots)
    return replace(origin, layer=".".join(names[0] for names in shared), where=origin.where if same else "")


def _fuse(draft: Draft, spots: Sequence[Spot], window: PlacementWindow, at: dict[Spot, int]) -> Change:
    """Replace several collectives by one. Views that make operands move before it, views of results after it."""
    position = window.position
    anchor = next((s for s in islice(at, position, None) if not is_view(s.op)), draft.end)
    end = at.get(anchor, len(at))
    above = [s for spot in spots for s in _producers(draft, spot) if at[s] >= position]
    below = [s for spot in spots for s in _readers(draft, spot) if at[s] < end]
    _move_views(draft, above, anchor, at)
    op = _send_together(draft, spots, anchor)
    _move_views(draft, below, anchor, at)
    for spot in spots:
        draft.remove(spot)
    what = f"{len(spots)} × {op.step!r} merged into one of {sum(map(_row_bytes, spots)):,} bytes"
    return Change("bucket", what, origin_text(_origin_of(spots)), {"rounds": len(spots) - 1})


def _move_views(draft: Draft, spots: Iterable[Spot], anchor: Spot, at: dict[Spot, int]) -> None:
    """Move those of the nodes that are views before `anchor`, in their order."""
    views = {spot for spot in spots if is_view(spot.op)}
    for spot in sorted(views, key=at.__getitem__):
        draft.move(spot, before=anchor)


def _send_together(draft: Draft, spots: Sequence[Spot], anchor: Spot) -> Conversion:
    """Add one collective before `anchor` that gives the results of several; return its step."""
    op, origin = _packed_op(spots), _origin_of(spots)
    parts = [_operand_as_row(draft, spot, anchor) for spot in spots]
    flat = draft.add(aten.cat.default, parts, 1, before=anchor, origin=origin)
    flat = draft.add(aten.reshape.default, flat, [-1], before=anchor, origin=origin)
    sent = draft.add(op, flat, before=anchor, origin=origin)
    _unpack_results(draft, spots, sent, [part.shape[1] for part in parts], anchor)
    return op


def _has_equal_shards(op: Op) -> bool:
    """False for a conversion with local tensors of different shapes."""
    return not isinstance(op, Conversion) or (has_equal_shards(op.src) and has_equal_shards(op.dst))


def _can_join(spot: Spot) -> bool:
    """True for an all-reduce, or a step that scatters or gathers one dim in the order of its axes, with even shards."""
    if not isinstance(spot.op, Conversion) or not has_static_sizes(*spot.ins, *spot.outs):
        return False
    step, src = spot.op.step, spot.op.src
    if isinstance(step, AllReduce):
        return has_equal_shards(src)
    if not isinstance(step, (ReduceScatter, AllGather)) or len({d for _, d in step.places}) != 1:
        return False
    if isinstance(step, ReduceScatter) and step.axes != tuple(a for a, _ in step.places):
        return False
    return has_equal_shards(src) and has_equal_shards(spot.op.dst)


def _step(spot: Spot) -> tuple[AllReduce | ReduceScatter | AllGather, Spec]:
    assert isinstance(spot.op, Conversion)
    assert isinstance(spot.op.step, (AllReduce, ReduceScatter, AllGather))
    return spot.op.step, spot.op.src


def _axes(step: AllReduce | ReduceScatter | AllGather) -> tuple[str, ...]:
    return tuple(a for a, _ in step.places) if isinstance(step, AllGather) else step.axes


def _kind(spot: Spot) -> Hashable:
    """Return the key that the members of a bucket share."""
    step, src = _step(spot)
    (x,) = spot.ins
    return type(step), _axes(step), getattr(step, "op", None), src.mesh, src.dtype, x.device, spot.origin.phase


def _ranks(spot: Spot) -> int:
    step, src = _step(spot)
    return prod(src.mesh.sizes[a] for a in _axes(step))


def _row_bytes(spot: Spot) -> int:
    return max(spot.ins[0].nbytes, spot.outs[0].nbytes)


def _packed_op(spots: Sequence[Spot]) -> Conversion:
    """Return the step for the row into which the operands of all members are packed."""
    step, src = _step(spots[0])
    axes = _axes(step)
    numbers = sum(prod(hint(n) for n in s.ins[0].shape) for s in spots)
    places = tuple((a, 0) for a in axes)
    if isinstance(step, AllGather):
        return Conversion(AllGather(places), row_spec(src.mesh, numbers, src.dtype, axes))
    rows = row_spec(src.mesh, numbers, src.dtype, axes, step.op)
    return Conversion(step if isinstance(step, AllReduce) else ReduceScatter(axes, places, step.op), rows)


def _operand_as_row(draft: Draft, spot: Spot, before: Spot) -> Value:
    """Return the operand as a matrix with one row, or for a reduce-scatter one row for each receiving rank."""
    step, _ = _step(spot)
    (x,) = spot.ins
    rows = _ranks(spot) if isinstance(step, ReduceScatter) else 1
    if isinstance(step, ReduceScatter) and step.places[0][1] > 0:
        dim, shape = step.places[0][1], list(x.shape)
        apart = [*shape[:dim], rows, shape[dim] // rows, *shape[dim + 1 :]]
        x = draft.add(aten.reshape.default, x, apart, before=before, origin=spot.origin)
        order = [dim, *(d for d in range(len(apart)) if d != dim)]
        x = draft.add(aten.permute.default, x, order, before=before, origin=spot.origin)
    numbers = prod(hint(n) for n in spot.ins[0].shape)
    return draft.add(aten.reshape.default, x, [rows, numbers // rows], before=before, origin=spot.origin)


def _unpack_results(draft: Draft, spots: Sequence[Spot], sent: Value, sizes: Sequence[int], before: Spot) -> None:
    """Unpack the results of all members from the row."""
    origin = _origin_of(spots)
    if not isinstance(_step(spots[0])[0], AllGather):
        widths = [prod(hint(n) for n in s.outs[0].shape) for s in spots]
        pieces = draft.add(aten.split_with_sizes.default, sent, widths, before=before, origin=origin)
        for spot, piece in zip(spots, pieces, strict=True):
            shape = list(spot.outs[0].shape)
            draft.replace(spot.outs[0], draft.add(aten.view.default, piece, shape, before=before, origin=spot.origin))
        return
    rows = draft.add(aten.view.default, sent, [_ranks(spots[0]), -1], before=before, origin=origin)
    pieces = draft.add(aten.split_with_sizes.default, rows, list(sizes), 1, before=before, origin=origin)
    for spot, piece in zip(spots, pieces, strict=True):
        draft.replace(spot.outs[0], _concatenated(draft, spot, piece, before))


def _concatenated(draft: Draft, spot: Spot, piece: Value, before: Spot) -> Value:
    """Return the gathered tensor for a matrix whose rows are the local tensors."""
    step, _ = _step(spot)
    assert isinstance(step, AllGather)
    dim, shape = step.places[0][1], list(spot.ins[0].shape)
    x = draft.add(aten.reshape.default, piece, [_ranks(spot), *shape], before=before, origin=spot.origin)
    if dim:
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        x = draft.add(aten.permute.default, x, order, before=before, origin=spot.origin)
    x = draft.add(aten.reshape.default, x, list(spot.outs[0].shape), before=before, origin=spot.origin)
    return draft.add(aten.contiguous.default, x, before=before, origin=spot.origin)
