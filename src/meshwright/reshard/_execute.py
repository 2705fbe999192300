"""Execution of a plan: each step becomes one function of local tensor and communicator, built once per rank.

A step that communicates is also available as a `Transfer`, so that its collective can run beside other work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.layout import Spec

from ._assembly import (
    Join,
    Part,
    Parts,
    allocation,
    assembly,
    away_part,
    empty_result,
    gathered_parts,
    shape_of,
    take_box,
    take_boxes,
)
from ._mover import Group, Mover, OutMover, Shape
from ._regions import Box, box_of, index
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

Action = Callable[[Tensor, Mover], Tensor]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a rank in four functions, of which only `call` communicates.

    So `call` can run beside other work, on another stream. `pack(x)` returns the operands for the local tensor `x`, and
    `results(x)` allocates the results. `call(operands, results, communicator)` writes the results. `join(results, x)`
    returns the new local tensor.
    """

    kind: str
    pack: Parts
    results: Parts
    call: Callable[[list[Tensor], list[Tensor], OutMover], object]
    join: Join


@dataclass(frozen=True, slots=True)
class Act:
    """Action of one rank for one step. `fresh` is True if the result shares no storage with the operand.

    `transfer` is the same action in parts if it communicates, else None.
    """

    run: Action
    fresh: bool = True
    transfer: Transfer | None = None


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
    take = take_box(box_of(made(step, x), rank), box_of(x, rank))
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
    results = allocation([x.local_shape(rank)])
    transfer = Transfer(
        "all_reduce", _alone, results, lambda sent, out, c: c.all_reduce(sent[0], op, group, out=out[0]), _first
    )
    return Act(lambda t, c: c.all_reduce(t, op, group), transfer=transfer)


def _all_gather(step: AllGather, x: Spec, rank: int) -> Act | None:
    group = step.group(x, rank)
    shapes = [x.local_shape(r) for r in group]
    boxes, target = [box_of(x, r) for r in group], box_of(made(step, x), rank)
    join = assembly(boxes, target)
    results, join_results = gathered_parts(boxes, target)
    transfer = Transfer(
        "all_gather", _alone, results, lambda sent, out, c: c.all_gather(sent[0], group, shapes, out=out), join_results
    )
    return Act(lambda t, c: join(c.all_gather(t, group, shapes), t), transfer=transfer)


def _reduce_scatter(step: ReduceScatter, x: Spec, rank: int) -> Act | None:
    op, group = step.op, step.group(x, rank)
    boxes = [box_of(made(step, x), r) for r in group]
    cut = take_boxes(boxes, box_of(x, rank))
    transfer = Transfer(
        "reduce_scatter",
        lambda t: list(cut(t)),
        allocation([shape_of(boxes[group.index(rank)])]),
        lambda sent, out, c: c.reduce_scatter(sent, op, group, out=out[0]),
        _first,
    )
    return Act(lambda t, c: c.reduce_scatter(cut(t), op, group), transfer=transfer)


def _alone(t: Tensor) -> list[Tensor]:
    return [t]


def _first(results: list[Tensor], t: Tensor) -> Tensor:
    return results[0]


def _all_to_all(step: AllToAll, x: Spec, rank: int) -> Act | None:
    group, held = step.group(x, rank), box_of(x, rank)
    found = routes(x, made(step, x), group)
    arrivals, kept = _arrivals(found, rank)
    incoming, outgoing = dict(arrivals), dict(found.sends(rank))
    join = assembly([*incoming.values(), *kept], box_of(made(step, x), rank))
    keeps = [take_box(box, held) for box in kept]
    if found.silent:
        return Act(lambda t, c: join([keep(t) for keep in keeps], t), fresh=not kept)
    senders = [group.index(r) for r in incoming]
    takes = [take_box(outgoing[r], held) if r in outgoing else None for r in group]
    shapes = [shape_of(incoming[r]) if r in incoming else (0,) for r in group]

    def pack(t: Tensor) -> list[Tensor]:
        none = t.new_empty((0,))
        return [none if take is None else take(t) for take in takes]

    def assemble(arrived: list[Tensor], t: Tensor) -> Tensor:
        return join([*[arrived[i] for i in senders], *[keep(t) for keep in keeps]], t)

    transfer = Transfer(
        "all_to_all",
        pack,
        allocation(shapes),
        lambda sent, out, c: c.all_to_all(sent, shapes, group, out=out),
        assemble,
    )
    fresh = not kept or len(incoming) > 0
    return Act(lambda t, c: assemble(c.all_to_all(pack(t), shapes, group), t), fresh, transfer)


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
        tuple((r, take_box(box, held)) for r, box in found.sends(rank)),
        tuple((r, shape_of(box)) for r, box in incoming),
        tuple(take_box(box, held) for box in kept),
        empty_result(step.to.local_shape(rank)) if leaving else assembly([b for _, b in incoming] + kept, need),
        group,
        found.silent,
    )


def _exchange(step: Exchange, x: Spec, rank: int) -> Act | None:
    do = halves_of(step, x, rank)
    if do is None:
        return None

    def assemble(parts: list[Tensor], t: Tensor) -> Tensor:
        return do.join([*parts[: len(do.expected)], *[take(t) for take in do.kept]], t)

    if do.silent:
        return Act(lambda t, c: assemble([], t), fresh=len(do.kept) == 0)
    peers, expected = [r for r, _ in do.outgoing], list(do.expected)
    is_idle = not (peers or expected)
    if is_idle:  # an empty message to itself tells the communicator the device of the others' messages
        peers, expected = [rank], [(rank, (0,))]

    def pack(t: Tensor) -> list[Tensor]:
        return [t.new_empty(0)] if is_idle else [take(t) for _, take in do.outgoing]

    def run(t: Tensor, c: Mover) -> Tensor:
        receives = [(r, shape, t.dtype, t.device) for r, shape in expected]
        return assemble(c.exchange(list(zip(peers, pack(t), strict=True)), receives, do.group), t)

    def call(sent: list[Tensor], out: list[Tensor], c: OutMover) -> object:
        receives = [(r, shape, x.dtype, x.device) for (r, shape), x in zip(expected, out, strict=True)]
        return c.exchange(list(zip(peers, sent, strict=True)), receives, do.group, out=out)

    transfer = Transfer("exchange", pack, allocation([shape for _, shape in expected]), call, assemble)
    return Act(run, len(do.kept) == 0 or len(do.expected) > 0, transfer)


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


def compile_plan(steps: Sequence[ConversionStep], specs: Sequence[Spec], rank: int) -> tuple[Act, ...]:
    """Return the actions of `rank` in order. If needed, the last one copies the result or makes it contiguous."""
    acts: list[Act] = []
    shared, strided, worked = True, False, False
    for step, x in zip(steps, specs, strict=False):
        act = compile_step(step, x, rank)
        if act is None:
            continue
        acts.append(act)
        worked = worked or not isinstance(step, View)
        shared = shared and not act.fresh
        strided = not act.fresh and (strided or not isinstance(step, View))
    src, dst = specs[0], specs[-1]
    if rank not in dst.mesh:
        return (*acts, _leaving(dst.local_shape(rank))) if src is not dst else ()
    if not worked:
        return _reshaped(src.local_shape(rank), dst.local_shape(rank))
    if shared:
        acts.append(Act(_copy))
    elif strided:
        acts.append(Act(_contiguous))
    return tuple(acts)


def _leaving(shape: Shape) -> Act:
    return Act(lambda t, c: t if shape and t.shape == shape else away_part(shape, t.dtype, t.device))


def _reshaped(before: Shape, after: Shape) -> tuple[Act, ...]:
    return () if before == after else (Act(lambda t, c: t.reshape(after)),)


def _copy(t: Tensor, c: Mover) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _contiguous(t: Tensor, c: Mover) -> Tensor:
    return t.contiguous()
