"""Repeated gathers: sharded parameters are gathered again for the backward pass instead of kept whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwright.graph import Change, Conversion, Draft, Pass, Program, Spot, Value, is_view, map_values, register_pass
from meshwright.reshard import AllGather


@dataclass(frozen=True, slots=True)
class _Gather:
    """A gather of a parameter in the forward pass, and the views of its result."""

    spot: Spot
    views: tuple[Spot, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(v for s in (self.spot, *self.views) for v in s.outs)


@register_pass
@dataclass(frozen=True)
class Regather(Pass):
    """Gather a parameter again before the first node of the backward pass that reads it (ZeRO stage 3).

    Both gathers give the same result, because parameters do not change before the update.
    """

    name: ClassVar[str] = "regather"
    keeps_sums: ClassVar[bool] = True

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        order = {spot: at for at, spot in enumerate(draft)}
        parameters = {i.value for i in program.inputs if i.role == "parameter"}
        changes: list[Change] = []
        for gather in list(_gathers(draft, parameters)):
            late = [s for v in gather.values for s in draft.users(v) if s.origin.phase != "forward"]
            if not late:
                continue
            self._repeat(draft, gather, min(late, key=lambda s: order[s]))
            saved = float(gather.spot.outs[0].nbytes)
            changes.append(
                Change(self.name, f"{gather.spot.ins[0]!r} gathered again", gather.spot.origin.layer, {"bytes": saved})
            )
        return draft.finish(*changes) if changes else program

    def _repeat(self, draft: Draft, gather: _Gather, before: Spot) -> None:
        became: dict[Value, Value] = {}
        for spot in (gather.spot, *gather.views):
            args, kwargs = map_values(lambda v: became.get(v, v), (spot.args, spot.kwargs))
            out = map_values(lambda v: Value(draft.names.fresh(v.name), v.shape, v.dtype, v.device), spot.out)
            draft.add_as(spot.op, args, kwargs, out, before)
            became.update(zip(spot.outs, Spot(spot.op, args, kwargs, out, spot.origin).outs, strict=True))
        for old in gather.values:
            for user in draft.users(old):
                if user.origin.phase != "forward" and user not in gather.views:
                    args, kwargs = map_values(lambda v: became.get(v, v), (user.args, user.kwargs))
                    draft.set_args(user, args, kwargs)


def _gathers(draft: Draft, parameters: set[Value]) -> Iterator[_Gather]:
    for spot in draft:
        if (
            not (isinstance(spot.op, Conversion) and isinstance(spot.op.step, AllGather))
            or spot.origin.phase != "forward"
        ):
            continue
        (x,) = spot.ins
        while x not in parameters and (made := draft.producer(x)) is not None and is_view(made.op):
            x = made.ins[0]
        if x in parameters:
            yield _Gather(spot, tuple(_views(draft, spot)))


def _views(draft: Draft, spot: Spot) -> Iterator[Spot]:
    """Yield the views of the results of `spot`, recursively; each view comes after its base."""
    for v in spot.outs:
        for user in draft.users(v):
            if is_view(user.op) and user.ins == (v,):
                yield user
                yield from _views(draft, user)
