"""Pattern search in a program: a backtracking search from a root to its operands over all spellings and orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..program.draft import Draft, Spot
from ..program.effects import is_random_operator, is_view
from ..program.node import Op, Value
from .known_values import known_tensor
from .node_reader import CAST, CASTS, Operand, Reader, VirtualValue, same_constant
from .pattern import Constant, Name, Pattern, Term
from .rule_trace import origin_modes

aten = torch.ops.aten

ADDS_A_DIM = {aten.unsqueeze.default}
"""Operators whose `dim` argument is a dim of the result."""

ORDERED = {aten.permute.default, aten.roll.default, aten.movedim.intlist}
"""Operators for which the order of the list of dims matters."""

Goals = tuple[tuple[TorchValue, TorchValue], "Goals"] | None
"""Linked list of pairs that must match: a part of a pattern, and what was found in the program for it."""


@dataclass(slots=True, eq=False)
class Match:
    """A match of a pattern: the bindings of its names. `spots` are the matched nodes."""

    pattern: Pattern
    draft: Draft
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    values: dict[Term, Operand] = field(default_factory=dict[Term, Operand])
    spots: dict[Spot, None] = field(default_factory=dict[Spot, None])
    computed: list[tuple[Constant, Any]] = field(default_factory=list[tuple[Constant, Any]])

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values that the rule replaces."""
        found = (self.values[t] for t in self.pattern.roots)
        return tuple(v for v in found if isinstance(v, Value))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Argument of the rule → matched value, constant or step."""
        return {**self.pattern.variant.given, **self.names}

    def known(self, v: Operand) -> Tensor | None:
        """Return the tensor that `v` is on every run; None if it depends on an input or is too large."""
        return known_tensor(self.draft, v)


Accept = Callable[[Match], bool]


def find_match(
    pattern: Pattern, spot: Spot, draft: Draft, reader: Reader, accept: Accept, written: Set[Value] = frozenset()
) -> Match | None:
    """Return the first match that `accept` takes and whose first root `spot` produces, or None.

    Values in `written` change in place: nodes that read them are not matched.
    """
    for v in spot.outs:
        search = _Search(Match(pattern, draft), draft, reader, accept, written)
        if search.solve(((pattern.roots[0], v), None)):
            return search.match
    return None


@dataclass(slots=True)
class _Search:
    match: Match
    draft: Draft
    reader: Reader
    accept: Accept
    written: Set[Value]
    trail: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def solve(self, goals: Goals) -> bool:
        """True if all (pattern, found) pairs match and the complete match is accepted."""
        while goals is not None:
            (wanted, found), goals = goals
            if type(wanted) is Term:
                return isinstance(found, (Value, VirtualValue)) and self._term(wanted, found, goals)
            if type(wanted) in (list, tuple):
                if type(found) not in (list, tuple) or len(found) != len(wanted):
                    return False
                goals = _ahead(zip(wanted, found, strict=True), goals)
            elif not self._leaf(wanted, found):
                return False
        return self._next_root()

    def _term(self, term: Term, v: Operand, goals: Goals) -> bool:
        passed: list[Spot] = []
        base = self.reader.base(v, passed)
        mark = len(self.trail)
        for reading in self.reader.read(base, term.op):
            shown = (*reading.args, base.dtype) if term.op is CAST and len(term.args) == 2 else reading.args
            if reading.place != term.place or len(shown) != len(term.args):
                continue
            for args in _orders(term, shown):
                self._hold(term, base if reading.call is None else v, (*passed, *reading.calls))
                if self.solve(self._goals(term, args, goals)):
                    return True
                self._undo(mark)
        if term.op is CAST:
            self._hold(term, base, passed)
            if self.solve(_ahead(zip(term.args, (base, base.dtype), strict=False), goals)):
                return True
            self._undo(mark)
        return False

    def _goals(self, term: Term, args: Sequence[TorchValue], goals: Goals) -> Goals:
        """Return `goals` with the arguments added. Dims are counted from the end for the comparison."""
        for at, is_dim in reversed(term.order):
            pair = (term.args[at], args[at])
            if is_dim:
                pair = (_from_end(term.op, pair[0], args[0]), _from_end(term.op, pair[1], args[0]))
            goals = (pair, goals)
        return goals

    def _leaf(self, wanted: TorchValue, found: TorchValue) -> bool:
        if isinstance(wanted, Name):
            if not isinstance(found, (Value, VirtualValue)) or (isinstance(found, Value) and not found.is_tensor):
                return False
            return self._name(wanted.name, self.reader.base(found))
        if isinstance(found, (Value, VirtualValue)):
            return False
        if not isinstance(wanted, Constant):
            return same_constant(wanted, found)
        if wanted.flip and (not isinstance(found, (int, float)) or found == 0):
            return False
        if wanted.name:
            return _is_of_kind(self.match.pattern, wanted.name, found) and self._name(wanted.name, wanted.undone(found))
        self.match.computed.append((wanted, found))
        self.trail.append((self.match.computed, None))
        return True

    def _name(self, name: str, found: TorchValue) -> bool:
        if name in self.match.names:
            return self.reader.alike(self.match.names[name], found)
        self.match.names[name] = found
        self.trail.append((self.match.names, name))
        return True

    def _hold(self, term: Term, v: Operand, calls: Sequence[Spot]) -> None:
        if term not in self.match.values:
            self.match.values[term] = v
            self.trail.append((self.match.values, term))
        for spot in calls:
            if spot not in self.match.spots:
                self.match.spots[spot] = None
                self.trail.append((self.match.spots, spot))

    def _undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            held, key = self.trail.pop()
            if key is None:
                held.pop()
            else:
                del held[key]

    def _next_root(self) -> bool:
        values = self.match.values
        root = next((r for r in self.match.pattern.roots if r not in values), None)
        if root is None:
            return stands_alone(self.match, self.draft, self.written) and self.accept(self.match)
        taken = {id(values[r]) for r in self.match.pattern.roots if r in values}
        mark = len(self.trail)
        for v in candidates(root, self.match, self.draft):
            if id(v) not in taken and self.solve(((root, v), None)):
                return True
            self._undo(mark)
        return False


def candidates(root: Term, match: Match, draft: Draft) -> Sequence[Value]:
    """Return the values that another root may be: readers, over some levels, of a matched value below the root."""
    way = _way_up(root, match)
    if way is None:
        return ()
    start, terms = way
    current = {start: None} if isinstance(start, Value) else {}
    for _ in terms:
        current = {v: None for x in current for spot in draft.users(x) for v in spot.outs}
    return tuple(current)


def _way_up(term: Term, match: Match) -> tuple[Operand, list[Term]] | None:
    """Return a matched value below `term`, and the terms from there up to `term`; None if there is none."""
    for arg in term.args:
        known = match.names.get(arg.name) if isinstance(arg, Name) else match.values.get(arg)
        if isinstance(known, Value):
            return known, [term]
    for arg in term.args:
        way = _way_up(arg, match) if isinstance(arg, Term) else None
        if way is not None:
            return way[0], [*way[1], term]
    return None


def stands_alone(match: Match, draft: Draft, written: Set[Value]) -> bool:
    """True if the matched nodes can be removed: inner values are read only inside, and all nodes ran in equal modes.

    Casts, views and nodes without operands may be read elsewhere. They stay, and cost nothing.
    """
    spots = match.spots
    if len({origin_modes(s.origin) for s in spots}) != 1:
        return False
    if written and any(v in written for spot in spots for v in spot.ins):
        return False
    roots = {id(v) for v in match.roots}
    free: dict[Spot, bool] = {}

    def is_inner(v: Value) -> bool:
        return id(v) in roots or (not draft.is_result(v) and all(user in spots for user in draft.users(v)))

    return all(all(map(is_inner, spot.outs)) or _is_free(spot, spots, draft, free) for spot in spots)


def _is_free(spot: Spot, spots: Mapping[Spot, None], draft: Draft, known: dict[Spot, bool]) -> bool:
    """True if a node may stay beside its replacement, because it and the matched nodes that it needs cost nothing."""
    if spot not in known:
        known[spot] = False
        makers = [p for v in spot.ins if (p := draft.producer(v)) in spots]
        cheap = is_view(spot.op) or spot.op in CASTS or (not spot.ins and not is_random_operator(spot.op))
        known[spot] = cheap and all(_is_free(p, spots, draft, known) for p in makers if p is not None)
    return known[spot]


def _ahead(pairs: Iterable[tuple[TorchValue, TorchValue]], goals: Goals) -> Goals:
    for pair in reversed(list(pairs)):
        goals = (pair, goals)
    return goals


def _orders(term: Term, args: tuple[TorchValue, ...]) -> tuple[tuple[TorchValue, ...], ...]:
    swap = term.commutes and isinstance(args[1], (Value, VirtualValue))
    return (args, (args[1], args[0], *args[2:])) if swap else (args,)


def _from_end(op: Op, dims: TorchValue, x: TorchValue) -> TorchValue:
    """Return dims counted from the end; a list is sorted unless the operator is in ORDERED."""
    if not isinstance(x, (Value, VirtualValue)):
        return dims
    n = len(x.shape) + (op in ADDS_A_DIM)
    if isinstance(dims, int) and n:
        return dims % n - n
    if isinstance(dims, (list, tuple)) and n and all(isinstance(d, int) for d in dims):
        found = [d % n - n for d in dims]
        return found if op in ORDERED else sorted(found)
    return dims


def _is_of_kind(pattern: Pattern, name: str, found: TorchValue) -> bool:
    kind = next((a.of for a in pattern.variant.attributes if a.name == name), None)
    if kind is float:
        return isinstance(found, (int, float)) and not isinstance(found, bool)
    if kind is int:
        return isinstance(found, int) and not isinstance(found, bool)
    return True
