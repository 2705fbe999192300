"""Simplification of chains of conversions: a chain is replaced by the cheapest plan between its ends.

Conversions do not change the elements of the tensor, so only the first and last layouts of a chain matter. The
`reshard.plan` between both replaces the chain if it moves less. Consecutive all-reduces along different axes become
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.graph import Change, Conversion, Draft, Pass, Program, Spot, Value, register_pass
from meshwright.layout import Layout
from meshwright.reshard import AllReduce, ConversionPlan, Exchange, Relabel, plan

from .._rows import have_equal_local_tensors, is_only_use, origin_text, received_bytes

aten = torch.ops.aten
IDLE = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}
Cost = tuple[int, int]
"""Number of rounds, and bytes that the busiest rank receives."""


@register_pass
@dataclass(frozen=True)
class Cancel(Pass):
    """Replace chains of conversions on one mesh by the plan between the ends, if it is cheaper.

    Slice and gather, and gather and slice, cancel out. Reduce-scatter and gather become an all-reduce; all-reduce and
    slice become a reduce-scatter. Steps from mesh to mesh are unchanged, because the ranks of the other mesh have their
    own programs.
    """

    name: ClassVar[str] = "cancel"
    keeps_sums: ClassVar[bool] = True

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        changes: list[Change] = []
        for spot in draft:
            if spot.gone or not isinstance(spot.op, Conversion) or isinstance(spot.op.step, Exchange):
                continue
            found = _merge_all_reduces(draft, spot) or _shortened(draft, spot)
            if found is not None:
                changes.append(found)
        return draft.finish(*changes) if changes else program


def _shortened(draft: Draft, last: Spot) -> Change | None:
    """Replace the part of the chain that ends in `last`, with the start that saves most, by the plan of its ends.

    Returns None if nothing is saved.
    """
    chain = _chain(draft, last)
    best: tuple[Cost, Sequence[Spot], ConversionPlan] | None = None
    for at in range(len(chain) - 1):
        part = chain[at:]
        if _op(part[0]).src.shape != _op(last).dst.shape:  # a view between factors and their product
            continue
        shorter = plan(_op(part[0]).src, _op(last).dst)
        old, new = (
            _cost([_op(s) for s in _unneeded_nodes(draft, part)]),
            _cost([Conversion(*s) for s in shorter.walk()]),
        )
        saved = (old[0] - new[0], old[1] - new[1])
        if min(saved) >= 0 and max(saved) > 0 and (best is None or saved > best[0]):
            best = saved, part, shorter
    if best is None:
        return None
    (rounds, nbytes), part, shorter = best
    _replace(draft, part, shorter)
    what = f"{' · '.join(repr(s.op) for s in part)} is {shorter!r}"
    return Change("cancel", what, origin_text(last.origin), {"bytes": nbytes, "rounds": rounds})


def _merge_all_reduces(draft: Draft, last: Spot) -> Change | None:
    """Merge an all-reduce with the one that produces its operand, along other axes, if it has no other reader."""
    (x,) = last.ins
    first = draft.producer(x)
    if first is None or not isinstance(first.op, Conversion) or not is_only_use(draft, x, last):
        return None
    a, b = first.op.step, _op(last).step
    if not isinstance(a, AllReduce) or not isinstance(b, AllReduce) or a.op != b.op or {*a.axes} & {*b.axes}:
        return None
    src, after = first.op.src, _op(last).src
    if src.mesh is not after.mesh or src.layout.dims != after.layout.dims or src.shape != after.shape:
        return None
    terms = dict.fromkeys(a.axes, a.op) | dict(after.layout.partial)
    layout = Layout(src.layout.dims, tuple(terms.items()), tuple(x for x in after.layout.varying if x not in terms))
    op = Conversion(AllReduce((*a.axes, *b.axes), a.op), after.with_layout(layout))
    old, new = _cost([first.op, _op(last)]), _cost([op])
    draft.replace(last.outs[0], draft.add(op, first.ins[0], before=last, origin=last.origin))
    draft.remove(last)
    draft.remove(first)
    return Change(
        "cancel",
        f"{a!r} · {b!r} is {op!r}",
        origin_text(last.origin),
        {"bytes": old[1] - new[1], "rounds": old[0] - new[0]},
    )


def _chain(draft: Draft, last: Spot) -> list[Spot]:
    """Return the longest chain of steps that ends in `last`; each step reads the result of the one before."""
    chain = [last]
    while True:
        before = _producer_of(draft, chain[0].ins[0])
        if before is None or not isinstance(before.op, Conversion) or isinstance(before.op.step, Exchange):
            return chain
        if not have_equal_local_tensors(before.op.dst, _op(chain[0]).src):
            return chain
        chain.insert(0, before)


def _producer_of(draft: Draft, v: Value) -> Spot | None:
    """Return the node that produces `v`, ignoring nodes that return their operand unchanged."""
    spot = draft.producer(v)
    while spot is not None and spot.op in IDLE and spot.ins[0].sizes == v.sizes:
        spot = draft.producer(spot.ins[0])
    return spot


def _unneeded_nodes(draft: Draft, part: Sequence[Spot]) -> list[Spot]:
    """Return the nodes of a chain that are no longer needed if its end is computed otherwise."""
    found = [part[-1]]
    for spot in reversed(part[:-1]):
        v = spot.outs[0]
        while (user := _only_user(draft, v)) is not None and user.op in IDLE and user is not found[0]:
            v = user.outs[0]
        if user is not found[0]:
            break
        found.insert(0, spot)
    return found


def _only_user(draft: Draft, v: Value) -> Spot | None:
    users = draft.users(v)
    return users[0] if len(users) == 1 and not draft.is_result(v) else None


def _op(spot: Spot) -> Conversion:
    assert isinstance(spot.op, Conversion)
    return spot.op


def _cost(ops: Sequence[Conversion]) -> Cost:
    return sum(int(op.communicates) for op in ops), sum(received_bytes(op.step, op.src) for op in ops)


def _replace(draft: Draft, part: Sequence[Spot], shorter: ConversionPlan) -> None:
    """Insert the plan at the start of the chain, or at its end if the result is larger than the operand.

    So the smaller tensor is the one that is kept.
    """
    last = part[-1]
    x = part[0].ins[0]
    at = part[0] if last.outs[0].nbytes <= x.nbytes else last
    steps = [(step, spec) for step, spec in shorter.walk() if not isinstance(step, Relabel)]
    for step, spec in steps:
        x = draft.add(Conversion(step, spec), x, before=at, origin=at.origin)
    if not steps:  # the result of a step is contiguous and shares no memory, and readers may rely on that
        how = {"memory_format": torch.contiguous_format}
        x = draft.add(aten.clone.default, x, before=last, origin=last.origin, **how)
    draft.replace(last.outs[0], x)
    draft.remove(last)
