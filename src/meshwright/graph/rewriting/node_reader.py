"""Normalized views of nodes for matching: all arguments, no casts that change nothing, every spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from meshwright.layout import TorchValue

from ..program.draft import Spot
from ..program.node import Conversion, Kind, Op, Value
from ..torch_hooks import Operator

aten = torch.ops.aten
CAST = aten.to.dtype
"""Operator that all casts are read as. It has one argument, because the result shows the dtype."""

CASTS = {CAST, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten._to_copy.default}
SAME_OPERATOR: Mapping[Op, Operator] = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.mm.default: aten.matmul.default,
    aten.bmm.default: aten.matmul.default,
    aten.swapaxes.default: aten.transpose.int,
    aten.swapdims.default: aten.transpose.int,
    aten.logical_not.default: aten.bitwise_not.default,
    aten._unsafe_view.default: aten.view.default,
}
"""Operator → equivalent operator that takes the same arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class VirtualValue:
    """A value that no node produces, but that another spelling of the program would produce: `op(*args)`."""

    op: Operator
    args: tuple[TorchValue, ...]
    shape: tuple[Any, ...]
    dtype: Kind
    device: str

    @property
    def kwargs(self) -> dict[str, TorchValue]:
        """The keyword arguments: none, because `args` are all arguments."""
        return {}


Operand = Value | VirtualValue


Spell = Callable[["Reader", Operand, tuple[TorchValue, ...]], tuple[TorchValue, ...] | None]
"""`spell(reader, result, arguments)` returns the other operator's arguments, or None; `arguments` are complete."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """Equivalent form of a call with another operator."""

    gives: Operator
    spell: Spell


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Table entries for an operator: other spellings, and a predicate for calls that change nothing (`idle`).

    `readable` holds the ids of the operators that a call may be read as. The spellings of an operator must be
    registered before it is read for the first time.
    """

    op: Op
    others: tuple[Spelling, ...]
    idle: Callable[[tuple[TorchValue, ...], Operand], bool] | None
    readable: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One reading of a value: result `place` of `op(*args)`. `calls` are the nodes that it covers.

    `known` holds the table entries of the operator.
    """

    op: Op
    args: tuple[TorchValue, ...]
    place: int
    calls: tuple[Spot, ...]
    known: Known

    @property
    def call(self) -> Spot | None:
        """The node that produces the value; None for a virtual value."""
        return self.calls[0] if self.calls else None


SPELLINGS: dict[Operator, list[Spelling]] = {}


def spelled(op: Operator, gives: Operator) -> Callable[[Spell], Spell]:
    """Return a decorator that registers a spelling: a call of `op` can be read as a call of `gives`."""

    def enter(spell: Spell) -> Spell:
        SPELLINGS.setdefault(op, []).append(Spelling(gives, spell))
        return spell

    return enter


class Reader:
    """Reader of values; `producer` returns the node of a value, None for an input."""

    def __init__(self, producer: Callable[[Value], Spot | None]) -> None:
        self._producer = producer
        self._full: dict[Operand, tuple[tuple[TorchValue, ...], Spot, Reading]] = {}
        self._through: list[Spot] = []

    def own(self, v: Operand) -> Reading | None:
        """Return the operator that produces `v`, with all arguments; None for an input."""
        known = self._full.get(v)
        if known is not None and known[1].args is known[0]:
            return known[2]
        if isinstance(v, VirtualValue):
            return _reading_of(*canonical(v.op, v.args, v), 0, ())
        call = self._producer(v)
        if call is None:
            return None
        place = 0 if call.out is v else call.outs.index(v)
        reading = _reading_of(*canonical(call.op, full_arguments(call.op, call.args, call.kwargs), v), place, (call,))
        self._full[v] = (call.args, call, reading)
        return reading

    def read(self, v: Operand, op: Op) -> Iterator[Reading]:
        """Yield every reading of `v` as a call of `op`."""
        own = self.own(v)
        if own is None:
            return
        if own.op is op:
            yield own
        for other in own.known.others:
            if other.gives is op:
                reading = self.spelled(other, v, own)
                if reading is not None:
                    yield reading

    def spelled(self, other: Spelling, v: Operand, own: Reading) -> Reading | None:
        """Return `own` in another spelling, with the nodes that the spelling covers; None if it does not apply."""
        mark = len(self._through)
        args = other.spell(self, v, own.args)
        through = self._through[mark:]
        del self._through[mark:]
        return None if args is None else _reading_of(other.gives, args, own.place, (*own.calls, *through))

    def as_call(self, v: TorchValue, op: Op) -> tuple[TorchValue, ...] | None:
        """Return the arguments of the first reading of `v` as a call of `op`, or None."""
        if not isinstance(v, (Value, VirtualValue)):
            return None
        passed: list[Spot] = []
        reading = next(self.read(self.base(v, passed), op), None)
        if reading is None:
            return None
        self._through += (*passed, *reading.calls)
        return reading.args

    def normal(self, v: Operand) -> Reading | None:
        """Return the normal form of `v`: the last spelling that applies, repeatedly; None for an input."""
        own = self.own(v)
        while own is not None:
            for other in reversed(own.known.others):
                reading = self.spelled(other, v, own) if other.gives is not own.op else None
                if reading is not None:
                    own = reading
                    break
            else:
                return own
        return None

    def base(self, v: Operand, passed: list[Spot] | None = None) -> Operand:
        """Return the value that `v` is a copy of, through casts to the same dtype, dropout with p=0 and the like.

        The nodes in between are appended to `passed`.
        """
        while (own := self.own(v)) is not None and own.known.idle is not None and _changes_nothing(own, v):
            if passed is not None and own.call is not None:
                passed.append(own.call)
            v = own.args[0]
        return v

    def alike(self, a: TorchValue, b: TorchValue, depth: int = 6) -> bool:
        """True if both are one value, or are produced by equal operators from equal values."""
        if not isinstance(a, (Value, VirtualValue)) or not isinstance(b, (Value, VirtualValue)):
            return same_constant(a, b)
        a, b = self.base(a), self.base(b)
        if a is b:
            return True
        ours, theirs = self.own(a), self.own(b)
        if not depth or ours is None or theirs is None or ours.place != theirs.place:
            return False
        if ours.op != theirs.op or a.dtype != b.dtype or len(ours.args) != len(theirs.args):
            return False
        return is_repeatable(ours.op) and all(
            self.alike(x, y, depth - 1) for x, y in zip(_flat_items(ours.args), _flat_items(theirs.args), strict=False)
        )


def _reading_of(op: Op, args: tuple[TorchValue, ...], place: int, calls: tuple[Spot, ...]) -> Reading:
    """Return a reading with the table entries of its operator."""
    known = _KNOWN.get(id(op))
    if known is None or known.op is not op:
        known = _KNOWN[id(op)] = _table_entries(op)
    return Reading(op, args, place, calls, known)


def _table_entries(op: Op) -> Known:
    others = tuple(SPELLINGS.get(op, ())) if isinstance(op, Operator) else ()
    return Known(op, others, NOTHING.get(op), frozenset([id(op), *(id(other.gives) for other in others)]))


_KNOWN: dict[int, Known] = {}


def is_repeatable(op: Op) -> bool:
    """True if two calls with equal arguments give equal results."""
    return isinstance(op, Operator) and torch.Tag.nondeterministic_seeded not in op.tags


def same_constant(a: TorchValue, b: TorchValue) -> bool:
    """True for equal constants. Floats may differ by a relative 1e-7, since they may be computed in two ways."""
    if type(a) is float and type(b) is float:
        return a == b or abs(a - b) <= 1e-7 * max(abs(a), abs(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) is type(b) and a == b
    return a == b


def inverse(c: TorchValue) -> TorchValue:
    """Return 1 / c for a number, or the flipped `Constant`."""
    return 1 / c if isinstance(c, (int, float)) else c.flipped()


@lru_cache(maxsize=4096)
def _schema(op: Operator) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value if a.has_default_value() else None) for a in op._schema.arguments)


@lru_cache(maxsize=4096)
def argument_names(op: Op) -> tuple[str, ...]:
    """Return the names of an operator's arguments, in order."""
    return tuple(name for name, _ in _schema(op)) if isinstance(op, Operator) else ()


def full_arguments(op: Op, args: tuple[TorchValue, ...], kwargs: Mapping[str, TorchValue]) -> tuple[TorchValue, ...]:
    """Return all arguments in the order of the schema, with defaults for omitted ones."""
    if not isinstance(op, Operator):
        return (*args, *kwargs.values())
    schema = _schema(op)
    if len(args) == len(schema):
        return args
    return (*args, *(kwargs.get(name, default) for name, default in schema[len(args) :]))


def canonical(op: Op, args: tuple[TorchValue, ...], out: Operand) -> tuple[Op, tuple[TorchValue, ...]]:
    """Return the canonical operator and its arguments in canonical form."""
    if isinstance(op, Conversion):
        return op, args
    op = SAME_OPERATOR.get(op, op)
    if op in CASTS and args[0].device == out.device:
        return CAST, args[:1]
    if op == aten.transpose.int:
        ndim = len(args[0].shape)
        if not all(isinstance(d, int) for d in args[1:3]):
            return op, args
        return op, (args[0], *sorted(d % ndim - ndim for d in args[1:3]))
    return op, args


def _changes_nothing(own: Reading, v: Operand) -> bool:
    """True if the result equals the first argument, with the same dtype."""
    x, idle = own.args[0], own.known.idle
    return idle is not None and isinstance(x, (Value, VirtualValue)) and x.dtype == v.dtype and idle(own.args, v)


def _same_shape(args: tuple[TorchValue, ...], v: Operand) -> bool:
    return tuple(map(str, args[0].shape)) == tuple(map(str, v.shape))


def _is_one(x: TorchValue) -> bool:
    return isinstance(x, (int, float)) and x == 1


NOTHING: dict[Op, Callable[[tuple[TorchValue, ...], Operand], bool]] = {
    CAST: lambda args, v: True,
    aten.dropout.default: lambda args, v: args[1] == 0 or args[2] is False,
    aten.mul.Tensor: lambda args, v: _is_one(args[1]),
    aten.div.Tensor: lambda args, v: _is_one(args[1]),
    aten.contiguous.default: lambda args, v: True,
    aten.view.default: _same_shape,
    aten.reshape.default: _same_shape,
    aten.expand.default: _same_shape,
}
"""Operators that may return their first argument unchanged, with a predicate for such calls."""


def _flat_items(tree: Sequence[TorchValue]) -> Iterator[TorchValue]:
    for item in tree:
        if isinstance(item, (list, tuple)):
            yield len(item)
            yield from _flat_items(item)
        else:
            yield item
