"""Editable program: a linked list of nodes, in which each node is moved, replaced or removed cheaply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.layout import TorchValue

from .._errors import ProgramError
from .effects import is_needed
from .node import Node, Op, Origin, Value, map_values, name_of, values_in
from .program import Change, Program
from .shape_inference import FreshNames, infer


@dataclass(slots=True, eq=False)
class Spot:
    """A node of a draft. Its arguments are updated when a value is replaced."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: TorchValue
    origin: Origin
    before: Spot | None = field(default=None, repr=False)
    after: Spot | None = field(default=None, repr=False)
    gone: bool = False
    original: Node | None = field(default=None, repr=False)
    """The node of the program that this one was before the draft."""

    @property
    def ins(self) -> tuple[Value, ...]:
        found: list[Value] = []
        for a in (*self.args, *self.kwargs.values()) if self.kwargs else self.args:
            if type(a) is Value:
                found.append(a)
            elif isinstance(a, (tuple, list, dict, slice)):
                found += values_in(a)
        return tuple(found)

    @property
    def node(self) -> Node:
        """The node as it is now, as a part of a program: the original one if it did not change."""
        was = self.original
        if was is not None and was.op is self.op and was.args is self.args and self._has_options(was.kwargs):
            return was
        return Node(self.op, self.args, self.kwargs, self.out, self.origin)

    def _has_options(self, options: Mapping[str, Any]) -> bool:
        """True if the keyword arguments are these objects: equal ones, such as 1 and 1.0, may have other results."""
        return self.kwargs.keys() == options.keys() and all(self.kwargs[key] is x for key, x in options.items())

    @property
    def outs(self) -> tuple[Value, ...]:
        return (self.out,) if type(self.out) is Value else tuple(values_in(self.out))


@dataclass(slots=True)
class _Uses:
    spots: dict[Spot, None] = field(default_factory=dict[Spot, None])


class Draft:
    """An editable copy of `program`. `finish` returns it as a program, without unneeded nodes and constants."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = FreshNames(program.all_values())
        self._producers: dict[Value, Spot] = {}
        self._uses: dict[Value, _Uses] = {}
        self._outputs = program.outputs
        self._writes = list(program.writes)
        self._results = set(self.results)
        self._ends = (_end(), _end())
        self._ends[0].after, self._ends[1].before = self._ends[1], self._ends[0]
        for node in program.nodes:
            spot = Spot(node.op, node.args, dict(node.kwargs), node.out, node.origin, original=node)
            self._link(spot, self._ends[1])

    def __iter__(self) -> Iterator[Spot]:
        """Yield the nodes in order, including nodes that are added after the current one during the iteration."""
        spot = self._ends[0].after
        while spot is not None and spot is not self._ends[1]:
            yield spot
            spot = _next_living(spot)

    @property
    def end(self) -> Spot:
        """The sentinel after the last node; a node added before it becomes the last one."""
        return self._ends[1]

    @property
    def first(self) -> Spot:
        """The first node, or `end` if there is none."""
        spot = self._ends[0].after
        assert spot is not None
        return spot

    @property
    def results(self) -> tuple[Value, ...]:
        return (*values_in(self._outputs), *(v for _, v in self._writes))

    def producer(self, value: Value) -> Spot | None:
        """Return the node that produces `value`; None for an input."""
        return self._producers.get(value)

    def users(self, value: Value) -> tuple[Spot, ...]:
        """Return the nodes that read `value`. Results of the program are not included; see `is_result`."""
        found = self._uses.get(value)
        return tuple(found.spots) if found else ()

    def is_result(self, value: Value) -> bool:
        return value in self._results

    def add(
        self, op: Op, *args: TorchValue, before: Spot, origin: Origin | None = None, **kwargs: TorchValue
    ) -> TorchValue:
        """Add a node `op(*args, **kwargs)` before a node, and return its values; their shapes are inferred."""
        out = infer(op, args, kwargs, self.program.rank, self.names)
        return self.add_as(op, args, kwargs, out, before, origin)

    def add_as(
        self,
        op: Op,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: TorchValue,
        before: Spot,
        origin: Origin | None = None,
    ) -> TorchValue:
        """Add a node with the given values `out`, and return them."""
        spot = Spot(op, args, kwargs, out, origin or _origin_near(before))
        self._link(spot, before)
        return out

    def replace(self, old: Value, new: Value) -> None:
        """Replace `old` by `new` in all nodes, outputs and writes."""
        if old is new:
            return
        for spot in self.users(old):
            self._unread(spot)
            spot.args, spot.kwargs = map_values(lambda v: new if v is old else v, (spot.args, spot.kwargs))
            self._read(spot)
        if old in self._results:
            self._outputs = map_values(lambda v: new if v is old else v, self._outputs)
            self._writes = [(x, new if v is old else v) for x, v in self._writes]
            self._results = (self._results - {old}) | {new}

    def set_args(self, spot: Spot, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Set the arguments of a node. The caller makes sure that its values do not change."""
        self._unread(spot)
        spot.args, spot.kwargs = args, spot.kwargs if kwargs is None else kwargs
        self._read(spot)

    def remove(self, spot: Spot) -> None:
        """Remove a node whose values are not read. Raises ProgramError if a value is read or is a result."""
        read = [v for v in spot.outs if self.users(v) or self.is_result(v)]
        if read:
            raise ProgramError(
                f"removing {name_of(spot.op)}",
                f"{read[0]!r} is read",
                "its readers would have no value",
                "call draft.replace(value, other) before draft.remove(node)",
            )
        self._unread(spot)
        for v in spot.outs:
            self._producers.pop(v, None)
        self._unlink(spot)
        spot.gone = True

    def move(self, spot: Spot, before: Spot) -> None:
        """Move a node directly before another one."""
        if spot is before:
            return
        self._unlink(spot)
        self._chain(spot, before)

    def finish(self, *changes: Change) -> Program:
        """Return the program of this draft without unneeded nodes and constants, with `changes` added to its record."""
        needed = {*self.results, *(x for x, _ in self._writes)}
        kept: list[Node] = []
        spot = self._ends[1].before
        while spot is not None and spot is not self._ends[0]:
            if is_needed(spot.op, spot.args, spot.outs, needed):
                needed.update(spot.ins)
                kept.append(spot.node)
            spot = spot.before
        program = self.program
        return replace(
            program,
            inputs=tuple(i for i in program.inputs if i.role != "constant" or i.value in needed),
            nodes=tuple(reversed(kept)),
            outputs=self._outputs,
            writes=tuple(self._writes),
            changes=(*program.changes, *changes),
        )

    def _link(self, spot: Spot, before: Spot) -> None:
        self._chain(spot, before)
        for v in spot.outs:
            self._producers[v] = spot
        self._read(spot)

    def _chain(self, spot: Spot, before: Spot) -> None:
        ahead = before.before
        assert ahead is not None
        spot.before, spot.after = ahead, before
        ahead.after = before.before = spot

    def _unlink(self, spot: Spot) -> None:
        if spot.before is not None and spot.after is not None:
            spot.before.after, spot.after.before = spot.after, spot.before

    def _read(self, spot: Spot) -> None:
        for v in spot.ins:
            self._uses.setdefault(v, _Uses()).spots[spot] = None

    def _unread(self, spot: Spot) -> None:
        for v in spot.ins:
            if v in self._uses:
                self._uses[v].spots.pop(spot, None)


def _end() -> Spot:
    return Spot(_nothing, (), {}, None, Origin())


def _nothing() -> None:
    """Operator of the sentinels at both ends of the list."""


def _next_living(spot: Spot) -> Spot | None:
    """Return the next node that has not been removed."""
    after = spot.after
    while after is not None and after.gone:
        after = after.after
    return after


def _origin_near(before: Spot) -> Origin:
    """Return the origin of the node `before`, or of the last node if `before` is the end."""
    near = before.before if before.op is _nothing and before.before is not None else before
    return near.origin
