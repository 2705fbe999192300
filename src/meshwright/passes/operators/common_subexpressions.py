"""Common subexpression elimination: equal nodes are merged, so each value is computed and sent once.

Two nodes are equal if they call the same operator, under the same modes, on equal operands. Two steps are equal if also
their operands have equal specs. Equal nodes give equal results on every rank, so all ranks merge the same collectives:
numbers that depend on the rank are inputs of a program, not constants in it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from meshwright.graph import (
    Change,
    Conversion,
    Draft,
    Pass,
    Program,
    Spot,
    Value,
    is_pure,
    is_view,
    register_pass,
    values_in,
)
from meshwright.layout import TorchValue
from meshwright.reshard import Exchange
from meshwright.tensor import key_of_tree

from .._rows import origin_text, received_bytes


@register_pass
@dataclass(frozen=True)
class Share(Pass):
    """Merge equal nodes; with `local=False`, merge only steps.

    With `phases`, values of the forward pass are also shared with the backward pass: fewer gathers, but more memory.
    Without it, a parameter that is gathered in each phase still is. Values that the caller receives are not merged, so
    they stay separate tensors. Steps from mesh to mesh are not merged, since ranks of the other mesh cannot know that
    they are equal.

    >>> Share(phases=True)
    Share(local=True, phases=True)
    """

    name: ClassVar[str] = "share"
    keeps_sums: ClassVar[bool] = True
    local: bool = True
    phases: bool = False

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        own = _seen_outside(draft)
        first: dict[Hashable, Spot] = {}
        changes: list[Change] = []
        merged = 0
        for spot in list(draft):
            if not self._may_be_shared(spot, own):
                continue
            twin = first.setdefault(self._key(spot), spot)
            if twin is spot:
                continue
            for old, new in zip(spot.outs, twin.outs, strict=True):
                draft.replace(old, new)
            draft.remove(spot)
            merged += 1
            if isinstance(spot.op, Conversion) and spot.op.communicates:
                changes.append(_change(spot.op, twin, spot))
        local = merged - len(changes)
        if local:
            changes.append(Change(self.name, "equal operators merged", saved={"operators": local}))
        return draft.finish(*changes) if merged else program

    def _may_be_shared(self, spot: Spot, own: set[Value]) -> bool:
        if not spot.outs or not is_pure(spot.op) or any(v in own for v in spot.outs):
            return False
        if isinstance(spot.op, Conversion):
            return not isinstance(spot.op.step, Exchange)
        return self.local

    def _key(self, spot: Spot) -> Hashable:
        origin = spot.origin
        phase = "" if self.phases and origin.phase != "update" else origin.phase
        arguments = key_of_tree((spot.args, dict(sorted(spot.kwargs.items()))), _leaf_key)
        return spot.op, arguments, phase, origin.grad, origin.autocast


def _leaf_key(x: TorchValue) -> Hashable:
    """Return the key of a leaf. Numbers are compared by type and text (0.0 is not -0.0, and 1 is not True)."""
    return x if isinstance(x, Value) else (type(x), repr(x))


def _seen_outside(draft: Draft) -> set[Value]:
    """Return the values that the caller receives, and their bases if they are views; these are never merged."""
    waiting = list(values_in(draft.program.outputs))
    found: set[Value] = set()
    while waiting:
        v = waiting.pop()
        maker = draft.producer(v)
        if v in found:
            continue
        found.add(v)
        if maker is not None and is_view(maker.op):
            waiting += maker.ins
    return found


def _change(op: Conversion, twin: Spot, spot: Spot) -> Change:
    what = f"{op!r} of {op.src!r} is shared with {origin_text(twin.origin)}"
    return Change("share", what, origin_text(spot.origin), {"bytes": received_bytes(op.step, op.src), "rounds": 1})
