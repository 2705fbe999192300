"""Facts of a captured program that all problems of a search read, each computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.graph import (
    BackwardReads,
    Node,
    Program,
    Value,
    alias_pairs,
    is_assertion,
    is_random_call,
    map_values,
    writes_to,
)
from meshwright.passes import layer_of
from meshwright.spmd import OperatorCall

from .operator_options import call_of, tensors_of


@dataclass(frozen=True, eq=False, slots=True)
class OperatorRow:
    """An operator with its tensors, each once, and what its backward pass reads.

    Operators with the same `signature` have the same rule, shapes and trained results.
    """

    node: Node
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    reads: BackwardReads
    signature: int


@dataclass(frozen=True, eq=False)
class ProgramFacts:
    """A captured program with what the search derives from it alone."""

    program: Program
    _calls: dict[int, OperatorCall | None] = field(default_factory=dict[int, OperatorCall | None], repr=False)
    _recomputed: dict[tuple[str, ...], RecomputedValues] = field(
        default_factory=dict[tuple[str, ...], "RecomputedValues"], repr=False
    )

    @cached_property
    def rows(self) -> tuple[OperatorRow, ...]:
        """The operators in order."""
        numbers: dict[object, int] = {}
        reads = self.program.reads_back
        return tuple(
            OperatorRow(
                node,
                tensors_of(node.ins),
                tensors_of(node.outs),
                reads[node],
                numbers.setdefault(self._signature(node), len(numbers)),
            )
            for node in self.program.nodes
        )

    def _signature(self, node: Node) -> object:
        """Return everything that the options of an operator depend on, as a key."""
        place = {v: n for n, v in enumerate(dict.fromkeys(node.ins))}
        args, kwargs = map_values(lambda v: (place[v], v.sizes, v.dtype), (node.args, dict(node.kwargs)))
        trains, has_frozen = tuple(v in self.trains for v in node.outs), not self.frozen.isdisjoint(node.ins)
        return node.op, repr(args), repr(kwargs), trains, has_frozen

    def call(self, row: OperatorRow) -> OperatorCall | None:
        """Return the call of an operator, as `call_of` does."""
        if row.signature not in self._calls:
            self._calls[row.signature] = call_of(row.node)
        return self._calls[row.signature]

    @cached_property
    def columns(self) -> Mapping[Value, tuple[tuple[int, str, int], ...]]:
        """Value → its places: the index of an operator, "gives" or "needs", and the index among the tensors there.

        The values are the tensors of the program, inputs first.
        """
        found: dict[Value, list[tuple[int, str, int]]] = {i.value: [] for i in self.program.inputs if i.value.is_tensor}
        for n, row in enumerate(self.rows):
            for at, v in enumerate(row.outs):
                found.setdefault(v, []).append((n, "gives", at))
            for at, v in enumerate(row.ins):
                found.setdefault(v, []).append((n, "needs", at))
        return {v: tuple(places) for v, places in found.items()}

    @cached_property
    def given(self) -> frozenset[Value]:
        """Parameters and buffers."""
        return frozenset(i.value for i in self.program.inputs if i.role in ("parameter", "buffer"))

    @cached_property
    def frozen(self) -> frozenset[Value]:
        """Parameters that get no gradient."""
        return frozenset(i.value for i in self.program.inputs if i.frozen)

    @property
    def trains(self) -> frozenset[Value]:
        """Values that get a gradient."""
        return self.program.trained

    @cached_property
    def nbytes(self) -> Mapping[Value, int]:
        """Bytes of each whole value."""
        return {v: v.nbytes for v in self.program.all_values()}

    @cached_property
    def made(self) -> frozenset[Value]:
        """Results of operators."""
        return frozenset(v for node in self.program.nodes for v in node.outs)

    @cached_property
    def aliases(self) -> tuple[tuple[Value, Value], ...]:
        """Pairs of a result and an argument that may share memory, in the order of the program."""
        return tuple(pair for node in self.program.nodes for pair in alias_pairs(node))

    @cached_property
    def views(self) -> Mapping[Value, Value]:
        """Result → the argument whose memory it shares."""
        return dict(self.aliases)

    @cached_property
    def repeatable(self) -> tuple[Node, ...]:
        """Operators that may run again: they draw no random numbers, write to nothing and assert nothing."""
        nodes = self.program.nodes
        return tuple(n for n in nodes if not (is_random_call(n) or writes_to(n.op) or is_assertion(n.op)))

    def recomputed(self, patterns: tuple[str, ...]) -> RecomputedValues:
        """Return the values that are recomputed with the layers of these patterns."""
        if patterns not in self._recomputed:
            self._recomputed[patterns] = RecomputedValues(self, patterns)
        return self._recomputed[patterns]


@dataclass(frozen=True, eq=False)
class RecomputedValues:
    """Values that a program does not keep for its backward pass if the layers of `patterns` are recomputed.

    As in the pass `Recompute`, these are values made in a layer and read by that layer alone, except random and
    communicated ones.
    """

    facts: ProgramFacts
    patterns: tuple[str, ...]

    @cached_property
    def layers(self) -> Mapping[Node, str]:
        """Operator that runs again → its recomputed layer."""
        if not self.patterns:
            return {}
        found = ((node, layer_of(node.origin.layer, self.patterns)) for node in self.facts.repeatable)
        return {node: layer for node, layer in found if layer is not None}

    @cached_property
    def values(self) -> Mapping[Value, str]:
        """Value → the layer in which it is recomputed."""
        held = set(self.facts.program.results)
        made = {v: layer for node, layer in self.layers.items() for v in node.outs if v not in held}
        inside = {v: layer for v, layer in made.items() if self._is_read_inside(v, layer)}
        for v, x in reversed(self.facts.aliases if inside else ()):  # a value is kept if a view of it is kept
            if x in inside and v not in inside:
                del inside[x]
        return inside

    def _is_read_inside(self, v: Value, layer: str) -> bool:
        users = self.facts.program.users.get(v, ())
        return all(layer_of(node.origin.layer, self.patterns) == layer for node in users)

    @cached_property
    def late(self) -> frozenset[Value]:
        """Results whose memory the backward pass reads, or that are inputs of recomputed layers."""
        views, found = self.facts.views, set[Value]()
        for v in self._values_read_back():
            root = v
            while root in views:
                root = views[root]
            found.add(root)
        return self.facts.made & found

    def _values_read_back(self) -> Iterator[Value]:
        for row in self.facts.rows:
            yield from (row.ins[n] for n in row.reads.ins)
            yield from (row.outs[n] for n in row.reads.outs)
            if row.node in self.layers:
                yield from (v for v in row.ins if v not in self.values)

    @cached_property
    def backward_order(self) -> tuple[tuple[tuple[Value, ...], tuple[Value, ...], int], ...]:
        """Operators in the order of the backward pass, as (values with gradients, kept results, bytes inside)."""
        own, late = self.facts.trains - self.facts.given, self.late
        found: list[tuple[tuple[Value, ...], tuple[Value, ...], int]] = []
        for row in reversed(self.facts.rows):
            around = tuple(v for v in dict.fromkeys((*row.node.ins, *row.node.outs)) if v in own)
            found.append((around, tuple(v for v in row.node.outs if v in late), row.reads.inside))
        return tuple(found)
