"""Driver that rewrites a program until no rule applies: selection of rules at each node, their order, termination."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import RewriteError
from ..program.draft import Draft, Spot
from ..program.effects import is_pure, writes_to
from ..program.node import Conversion, Op, Value, map_values, name_of, values_in
from ..program.program import Change, Program
from ..torch_hooks import Operator
from .known_values import known_tensor
from .match_confirmation import Confirmed, Template
from .node_reader import Operand, Reader, Reading, Spelling, VirtualValue, full_arguments
from .pattern_match import Match, find_match
from .rewrite_rule import AnyRewrite, Rewrite, Rewriter

AROUND = 3
"""Distance from a change, in nodes, within which readers are visited again at once. Others wait for the next round."""


def rewrite(program: Program, rules: Sequence[AnyRewrite], by: str = "rewrite", limit: int | None = None) -> Program:
    """Return the program after rewriting until no rule applies. The steps are recorded in its changes.

    The rewriting terminates because most steps make the program shorter, and the number of other steps is bounded.

    Raises:
        RewriteError: more than `limit` steps did not make the program shorter (default: 100 + 4 per node).
    """
    run = _Run(program, tuple(rules), by, 100 + 4 * len(program.nodes) if limit is None else limit)
    run.to_the_end()
    return run.draft.finish(*run.changes, *run.summary()) if run.changes else program


Needs = frozenset[frozenset[int]]
Key = Op | type | None
"""Key of the index: an operator, the class of a conversion step, or None for all nodes."""


@dataclass(slots=True, eq=False)
class Edit:
    """The operations of a pattern rewriter at one node of a draft."""

    draft: Draft
    reader: Reader
    spot: Spot
    added: list[Spot] = field(default_factory=list[Spot])
    replaced: bool = False

    @property
    def arguments(self) -> tuple[TorchValue, ...]:
        """The arguments of the node in the order of its operator's schema, with defaults for omitted ones."""
        return full_arguments(self.spot.op, self.spot.args, self.spot.kwargs)

    @property
    def unchanged(self) -> Value | None:
        """The value that the node's result is a copy of; None if the node computes something."""
        if len(self.spot.outs) != 1:
            return None
        base = self.reader.base(self.spot.outs[0])
        return base if isinstance(base, Value) and base is not self.spot.outs[0] else None

    def producer(self, v: Value) -> Spot | None:
        return self.draft.producer(v)

    def users(self, v: Value) -> tuple[Spot, ...]:
        return self.draft.users(v)

    def is_result(self, v: Value) -> bool:
        return self.draft.is_result(v)

    def operands(self, v: Value, op: Op) -> tuple[TorchValue, ...] | None:
        """Return the arguments of `v` read as a call of `op`, in any spelling; None if it is no such call."""
        reading = next(self.reader.read(self.reader.base(v), op), None)
        return None if reading is None else reading.args

    def known(self, v: Operand) -> Tensor | None:
        """Return the tensor that `v` is on every run; None if it depends on an input or is too large."""
        return known_tensor(self.draft, v)

    def match(self, rule: Rewrite) -> Match | None:
        """Return the match of `rule` whose first root is produced by this node, or None."""
        for pattern in rule.patterns:
            confirmed = Confirmed(rule, pattern)
            found = find_match(
                pattern, self.spot, self.draft, self.reader, lambda m, c=confirmed: c.template(m) is not None
            )
            if found is not None:
                return found
        return None

    def add(self, op: Op, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        """Add a node before this one and return its values."""
        out = self.draft.add(op, *args, before=self.spot, origin=self.spot.origin, **kwargs)
        ahead = self.spot.before
        assert ahead is not None
        self.added.append(ahead)
        return out

    def replace(self, *new: Value) -> None:
        """Replace the values of this node by the given ones, one for each."""
        for old, v in zip(self.spot.outs, new, strict=True):
            self.draft.replace(old, v)
        self.replaced = True


Entry = Confirmed | Rewriter
"""Entry of the index: one pattern of a rule, or a rewriter."""


def _entrances(entry: Entry) -> Iterator[tuple[Key, Needs]]:
    """Yield the operator or step class at whose nodes an entry is tried (None: all nodes), with its needs.

    The needs are sets of ids of operators; each set must include a producer of an operand.
    """
    if isinstance(entry, Rewriter):
        yield from ((key, Needs()) for key in entry.on or (None,))
        return
    yield from entry.pattern.entrances


@dataclass(slots=True)
class _Run:
    program: Program
    rules: tuple[AnyRewrite, ...]
    by: str
    limit: int
    draft: Draft = field(init=False)
    reader: Reader = field(init=False)
    changes: list[Change] = field(default_factory=list[Change])
    counts: Counter[str] = field(default_factory=Counter[str])
    not_shorter: int = 0
    written: frozenset[Value] = frozenset()

    def __post_init__(self) -> None:
        self.draft = Draft(self.program)
        self.reader = Reader(self.draft.producer)
        self.written = frozenset(v for node in self.program.nodes if writes_to(node.op) for v in node.ins)

    def to_the_end(self) -> None:
        """Apply rules in descending order of benefit to all nodes, and repeat until a whole round changes nothing."""
        tiers = [
            _index(self.reader, list(tier))
            for _, tier in groupby(sorted(self.rules, key=lambda r: -r.benefit), key=lambda r: r.benefit)
        ]
        changed = True
        while changed:
            changed = False
            for tier in tiers:
                changed = self._sweep(tier) or changed

    def summary(self) -> Iterator[Change]:
        told = ", ".join(f"{n} × {name}" for name, n in self.counts.items())
        bound = f"; {self.not_shorter} of at most {self.limit} steps did not make the program shorter"
        yield Change(self.by, f"{told}; no rule applies any more{bound if self.not_shorter else ''}")

    def _sweep(self, index: _Index) -> bool:
        changed = False
        waiting = deque(self.draft)
        queued = set(waiting)
        while waiting:
            spot = waiting.popleft()
            queued.discard(spot)
            if spot.gone:
                continue
            for entry in index.at(spot):
                touched = self._try(entry, spot)
                if touched is not None:
                    changed = True
                    again = [s for s in self._around(touched) if s not in queued]
                    waiting.extend(again)
                    queued.update(again)
                    break
        return changed

    def _try(self, entry: Entry, spot: Spot) -> list[Spot] | None:
        """Return the new nodes after a change at `spot`; None if nothing was changed."""
        if isinstance(entry, Rewriter):
            return self._apply_rewriter(entry, spot)
        found: list[Template] = []

        def accept(match: Match) -> bool:
            template = entry.template(match)
            if template is None or not self._moves_on(match, template):
                return False
            found.append(template)
            return True

        match = find_match(entry.pattern, spot, self.draft, self.reader, accept, self.written)
        return None if match is None else self._apply(entry.rule, match, found[-1])

    def _moves_on(self, match: Match, template: Template) -> bool:
        """False if the template has the same operators as the match, or if a result is read too early."""
        same = len(match.spots) == len(template.calls)
        if same and Counter(s.op for s in match.spots) == Counter(call.op for call in template.calls):
            return False
        return self._insertion_point(match) is not None

    def _insertion_point(self, match: Match) -> Spot | None:
        """Return the node to insert before: behind all needed values, before all readers; None if there is none."""

        roots = self._producers(match.roots)
        if len(match.pattern.roots) == 1:
            return roots[0]
        spots = [*self.draft, self.draft.end]
        order = {spot: at for at, spot in enumerate(spots)}
        needed = self._producers(v for found in match.names.values() for v in _values_below(found))
        behind_needed = max((order[spot] + 1 for spot in needed), default=0)
        place = max(behind_needed, min(order[root] for root in roots))
        is_read_before = any(order[reader] < place for reader in self._outside_readers(match))
        return None if is_read_before else spots[place]

    def _outside_readers(self, match: Match) -> Iterator[Spot]:
        """Yield the nodes that read a replaced value and stay."""
        return (user for v in match.roots for user in self.draft.users(v) if user not in match.spots)

    def _producers(self, values: Iterable[Value]) -> list[Spot]:
        """Return the nodes that produce the values; inputs have none."""
        return [spot for v in values if (spot := self.draft.producer(v)) is not None]

    def _apply(self, rule: AnyRewrite, match: Match, template: Template) -> list[Spot]:
        place = self._insertion_point(match)
        origin = self.draft.producer(match.roots[0])
        assert place is not None
        assert origin is not None
        new: list[Spot] = []
        outs = self._put(match, template, place, origin, new)
        for old, v in zip(match.roots, outs, strict=True):
            self.draft.replace(old, v)
        gone = self._clear(match.spots)
        self._count(rule.name, gone, new, origin)
        return new

    def _put(self, match: Match, template: Template, place: Spot, like: Spot, new: list[Spot]) -> list[Value]:
        """Add the calls of `put` before `place`, and return the values of its results."""

        def add(op: Op, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue], out: TorchValue) -> None:
            self.draft.add_as(op, args, kwargs, out, place, like.origin)
            assert place.before is not None
            new.append(place.before)

        def real(v: Operand) -> Value:
            """Return the value itself; add a node for a virtual value."""
            if isinstance(v, Value):
                return v
            args = tuple(real(a) if isinstance(a, VirtualValue) else a for a in v.args)
            out = self._fresh(v.op, v)
            add(v.op, args, v.kwargs, out)
            return out

        def named(op: Op) -> Callable[[Value], Value]:
            return lambda v: here.setdefault(v, self._fresh(op, v))

        here = {value: real(match.names[name]) for name, value in template.inputs.items()}
        for call in template.calls:
            out = map_values(named(call.op), call.out)
            args, kwargs = map_values(here.__getitem__, (call.args, dict(call.kwargs)))
            add(call.op, args, kwargs, out)
        return [here[v] for v in template.outs]

    def _fresh(self, op: Op, looks: Operand) -> Value:
        stem = looks.name.rstrip("_0123456789") if isinstance(looks, Value) else name_of(op).split(".")[1]
        return Value(self.draft.names.fresh(stem), tuple(looks.shape), looks.dtype, looks.device)

    def _clear(self, spots: Iterable[Spot]) -> list[Spot]:
        """Remove the given nodes that are no longer read, and return them."""
        left, gone = list(spots), list[Spot]()
        while True:
            dead = [s for s in left if not any(self.draft.users(v) or self.draft.is_result(v) for v in s.outs)]
            if not dead:
                return gone
            for spot in dead:
                self.draft.remove(spot)
            gone += dead
            left = [s for s in left if not s.gone]

    def _clear_up(self, spots: list[Spot]) -> list[Spot]:
        """Remove nodes that are no longer read, then their unread pure producers, repeatedly; return all of them."""
        gone: list[Spot] = []
        while spots:
            done = self._clear(spots)
            gone += done
            above = (self.draft.producer(v) for spot in done for v in spot.ins)
            spots = [s for s in dict.fromkeys(above) if s is not None and is_pure(s.op)]
        return gone

    def _apply_rewriter(self, rule: Rewriter, spot: Spot) -> list[Spot] | None:
        edit = Edit(self.draft, self.reader, spot)
        what = rule.apply(edit, spot)
        if not what:
            return None
        gone = self._clear_up([spot]) if edit.replaced else []
        self._count(rule.name, gone, edit.added, spot, what)
        return edit.added or [spot]

    def _count(self, name: str, gone: Sequence[Spot], new: Sequence[Spot], at: Spot, what: str = "") -> None:
        self.counts[name] += 1
        where = " ".join(filter(None, [at.origin.layer, at.origin.where]))
        what = what or f"{len(gone)} operators become {', '.join(name_of(s.op) for s in new) or 'none'}"
        saved = {"operators": float(len(gone) - len(new))} if len(gone) != len(new) else {}
        self.changes.append(Change(self.by, f"{name}: {what}", where, saved))
        if len(gone) > len(new):
            return
        self.not_shorter += 1
        if self.not_shorter > self.limit:
            often = ", ".join(f"{name} ({n} times)" for name, n in self.counts.most_common(3))
            raise RewriteError(
                f"{self.by} of {len(self.program.nodes)} operators",
                f"{self.not_shorter} steps that do not make the program shorter: {often}",
                "rules that undo each other never terminate",
                "add a where=... that refuses results of another rule, or raise limit=... if so many steps are right",
            )

    def _around(self, touched: Sequence[Spot]) -> list[Spot]:
        """Return the nodes and their readers up to AROUND steps away."""
        found = dict.fromkeys(s for s in touched if not s.gone)
        edge = list(found)
        for _ in range(AROUND):
            edge = [u for s in edge for v in s.outs for u in self.draft.users(v)[:8] if u not in found]
            found.update(dict.fromkeys(edge))
        return list(found)


@dataclass(slots=True, eq=False)
class _Group:
    """Entries that begin at one operator and have the same needs for the producers of its operands."""

    needs: Needs
    entries: list[Entry] = field(default_factory=list[Entry])


Groups = dict[int, list[_Group]]
"""Id of an operator that produces an operand → groups that need it or an alternative; 0 → groups without needs."""

Plan = tuple[Groups, list[tuple[Spelling, Groups]]]


@dataclass(slots=True)
class _Index:
    """Index of entries by the operator of a node, then by the operators that produce its operands."""

    reader: Reader
    by_op: dict[Key, Groups] = field(default_factory=dict[Key, Groups])
    plans: dict[int, Plan] = field(default_factory=dict[int, Plan])

    def at(self, spot: Spot) -> list[Entry]:
        """Return the entries whose first root this node may produce, in the order to try: largest patterns first."""
        known = self.plans.get(id(spot.op)) if isinstance(spot.op, Operator) else self._plan(spot)
        if known is None:
            known = self.plans[id(spot.op)] = self._plan(spot)
        groups, others = known
        found = self._fitting(groups, spot.ins) if groups else []
        for other, groups in others:
            v = spot.outs[0]
            own = self.reader.own(v)
            reading = self.reader.spelled(other, v, own) if own is not None else None
            if reading is not None:
                found += self._fitting(groups, reading.args)
        return sorted(found, key=_size) if len(found) > 1 else found

    def _plan(self, spot: Spot) -> Plan:
        """Return the groups for an operator, and the groups for each of its other spellings."""
        own = self.reader.own(spot.outs[0]) if spot.outs else None
        groups: Groups = {}
        for key in _keys(spot, own):
            for maker, found in self.by_op.get(key, {}).items():
                groups.setdefault(maker, []).extend(found)
        others = [other for other in own.known.others if other.gives is not own.op] if own is not None else []
        return groups, [(other, self.by_op[other.gives]) for other in others if other.gives in self.by_op]

    def _fitting(self, groups: Groups, operands: Sequence[TorchValue]) -> list[Entry]:
        below = self._ops_below(operands)
        led = {id(group): group for maker in (0, *below) for group in groups.get(maker, ())}
        fit = (g for g in led.values() if not any(makers.isdisjoint(below) for makers in g.needs))
        return [entry for group in fit for entry in group.entries]

    def _ops_below(self, operands: Sequence[TorchValue]) -> set[int]:
        """Return the ids of the operators that the operands can be read as."""
        found: set[int] = set()
        for x in operands:
            own = self.reader.own(self.reader.base(x)) if isinstance(x, (Value, VirtualValue)) else None
            if own is not None:
                found |= own.known.readable
        return found


def _index(reader: Reader, rules: Sequence[AnyRewrite]) -> _Index:
    index = _Index(reader)
    groups: dict[tuple[Key, Needs], _Group] = {}
    for entry in (entry for rule in rules for entry in _entries(rule)):
        for key, needs in _entrances(entry):
            if (key, needs) not in groups:
                group = groups[key, needs] = _Group(needs)
                for maker in min(needs, key=len) if needs else (0,):
                    index.by_op.setdefault(key, {}).setdefault(maker, []).append(group)
            groups[key, needs].entries.append(entry)
    return index


def _entries(rule: AnyRewrite) -> list[Entry]:
    return [rule] if isinstance(rule, Rewriter) else [Confirmed(rule, pattern) for pattern in rule.patterns]


def _size(entry: Entry) -> int:
    return 0 if isinstance(entry, Rewriter) else -len(entry.pattern.ops)


def _keys(spot: Spot, own: Reading | None) -> Iterator[Key]:
    if isinstance(spot.op, Conversion):
        yield from type(spot.op.step).__mro__
    else:
        yield spot.op if own is None else own.op
    yield None


def _values_below(found: TorchValue) -> Iterator[Value]:
    if isinstance(found, VirtualValue):
        for a in found.args:
            yield from _values_below(a)
    else:
        yield from values_in(found)
