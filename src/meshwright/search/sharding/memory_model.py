"""Bytes that a rank holds: parameters with gradients and states, and results kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol, TypeVar

import numpy as np

from meshwright.graph import BackwardReads, Node, Program, Value, alias_pairs
from meshwright.layout import hint
from meshwright.passes import Bucket

from .conversion_prices import Prices
from .forms import AxisForm, collective
from .memory_saving import LEAST, NOTHING, MemorySaving, RecomputedValues
from .operator_options import Forms, Option, Options, PossibleForms, tensors_of
from .variable_elimination import Costs, Table

T = TypeVar("T")
UPDATE = 1.0
"""Temporary bytes of an optimizer's update, per byte of a parameter."""


def per_byte(saving: MemorySaving, replicas: int, states: float) -> float:
    """Return the bytes of a parameter, its gradient, its states and its update on a rank, per byte of the parameter."""
    own, gradient, state = saving.parameter(replicas)
    return own + gradient + (states + UPDATE) * state


class Once(Protocol):
    """Function that returns what `make` returns, possibly what it returned before for an equal key."""

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T: ...


def make_anew(key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` returns, for a memory model whose tables are not kept."""
    return make()


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of a program's values by their forms; `once` returns one object for all equal keys."""

    program: Program
    prices: Prices
    once: Once

    def tables(
        self,
        options: Mapping[Node, Sequence[Option]],
        forms_of: PossibleForms,
        number: Mapping[Value, int],
    ) -> Iterator[Table]:
        """Yield the bytes of values in their forms, as tables: parameters with gradients and states, and kept results.

        The backward pass of an operator reads the operand as it was converted for this operator. If ranks communicated
        for the conversion, its result is held in addition to the value. Recomputation does not communicate again, so a
        value that is recomputed is kept if a communication made it. A gathered parameter is kept too, except in stage 3
        of ZeRO.
        """
        for v, forms in forms_of.items():
            yield Table((number[v],), self._bytes_by_form(forms, self._held_bytes(v)))
        for n, (node, ways) in enumerate(options.items()):
            if self.reads[node].inside and self.dropped.layer(node) is None:
                key = "inside", id(ways), self.reads[node]
                yield Table(
                    (n,), self.once(key, lambda at=node, of=ways: np.array([self._bytes_inside(at, w) for w in of]))
                )
            for v, costs in self._sent_results(node, ways, forms_of):
                if costs.any():
                    yield Table((n, number[v]), costs)
            for v, costs in self._sent_operands(node, ways, forms_of):
                if costs.any():
                    yield Table((number[v], n), costs)

    def _sent_results(
        self, node: Node, options: Sequence[Option], forms_of: PossibleForms
    ) -> Iterator[tuple[Value, Costs]]:
        """Yield the results whose conversion from the forms that options give is kept, with its bytes."""
        for place, v in enumerate(tensors_of(node.outs)):
            if self._is_sent_out(v):
                given = tuple(option.gives[place] for option in options)
                yield v, self._sent_bytes(v, given, forms_of[v], into=True)

    def _sent_operands(
        self, node: Node, options: Sequence[Option], forms_of: PossibleForms
    ) -> Iterator[tuple[Value, Costs]]:
        """Yield the operands whose conversion to the forms that options need is kept, with its bytes."""
        for place, v in enumerate(tensors_of(node.ins)):
            if self._is_sent_in(v, node, place):
                needed = tuple(option.needs[place] for option in options)
                yield v, self._sent_bytes(v, forms_of[v], needed)

    def made_at(self, node: Node, option: Option, forms: Forms) -> float:
        """Return the bytes that live from a node until the backward pass: its results, and what is sent for it."""
        made, read = tensors_of(node.outs), tensors_of(node.ins)
        pairs = [(v, give, forms[v]) for v, give in zip(made, option.gives, strict=True) if self._is_sent_out(v)]
        needs = enumerate(zip(read, option.needs, strict=True))
        pairs += [(v, forms[v], need) for n, (v, need) in needs if self._is_sent_in(v, node, n)]
        sent = sum(float(self._sent_bytes(v, (have,), (need,))[0, 0]) for v, have, need in pairs)
        inside = 0.0 if self.dropped.layer(node) else self._bytes_inside(node, option)
        return sent + inside + sum(self.held(v, forms[v]) for v in made)

    def held(self, v: Value, form: AxisForm) -> float:
        """Return the bytes of a value that a rank holds beyond a single operator or layer."""
        return self._held_bytes(v) / self._ranks(form)

    def _is_sent_out(self, v: Value) -> bool:
        """True if the result of a communication that makes a value is kept, though the value is recomputed."""
        return v in self.late and v in self.dropped.values

    def _is_sent_in(self, v: Value, node: Node, place: int) -> bool:
        """True if an operand that was communicated for a node is kept."""
        if v in self.given:
            return v in self.trains and self.prices.saving.zero != 3
        return place in self.reads[node].ins or (v in self.trains and self.dropped.layer(node) is not None)

    def fewest_inside(self, node: Node, ways: Sequence[Option]) -> float:
        """Return the bytes inside an operator, under the option that holds least."""
        return min(self._bytes_inside(node, way) for way in ways) if self.reads[node].inside else 0.0

    def _bytes_inside(self, node: Node, way: Option) -> float:
        """Return the bytes that an operator's backward pass reads and that are in no value of the program.

        Ranks that have parts of the operator share them.
        """
        return self.reads[node].inside * self.share / (self.prices.ranks if is_cut(way) else 1)

    def _sent_bytes(
        self, v: Value, have: tuple[AxisForm, ...], need: tuple[AxisForm, ...], into: bool = False
    ) -> Costs:
        """Return the bytes of a value after each conversion, as a matrix; 0 if ranks do not communicate for it."""

        def costs() -> Costs:
            whole = self._bytes_by_form(need, self._bytes_in_flight(v))
            return np.array([[float(collective(a, b) is not None) for b in need] for a in have]) * whole

        return self.once(("sent", have, need, self._bytes_in_flight(v), into), costs)

    def _bytes_by_form(self, forms: tuple[AxisForm, ...], nbytes: float) -> Costs:
        ranks = self.prices.ranks
        return self.once(
            ("held", forms, nbytes),
            lambda: np.array([nbytes / (ranks if form.kind == "cut" else 1) for form in forms]),
        )

    def _held_bytes(self, v: Value) -> float:
        if v in self.given:
            return v.nbytes * self._bytes_per_parameter_byte(v) if v in self.trains else float(v.nbytes)
        return self._bytes_in_flight(v) if v in self.late and v not in self.dropped.values else 0.0

    def _bytes_per_parameter_byte(self, v: Value) -> float:
        """Return the bytes of a parameter, its gradient and its states on a rank, per byte of the parameter."""
        saving = self.prices.saving if self.is_cut_by_zero(v) else NOTHING
        return per_byte(saving, self.prices.replicas, self.prices.states)

    def is_cut_by_zero(self, v: Value) -> bool:
        """True if ZeRO shards a parameter; small ones stay whole."""
        return prod(map(hint, v.shape)) >= LEAST

    def temporary_bytes(self, options: Options, forms: Forms) -> float:
        """Return the temporary bytes of a recomputed layer, and of parameters and gradients in communication."""
        cut = [v for v in self.given & self.trains & forms.keys() if self.is_cut_by_zero(v)]
        whole = [v.nbytes / self._ranks(forms[v]) for v in cut]
        row = max(max(whole, default=0.0), min(Bucket.bytes, sum(whole)))
        return max(self.of_layers(options, forms).values(), default=0.0) + self._buckets_in_flight * row

    @property
    def _buckets_in_flight(self) -> int:
        """Number of buckets in flight, of gradients or of gathered parameters.

        Stage 3 of ZeRO has one more with recomputation, which was preceded by a gather too.
        """
        saving = self.prices.saving
        return {2: 1, 3: 2 if saving.recompute else 1}.get(saving.zero, 0)

    def gradient_bytes(self, forms: Forms) -> float:
        """Return the bytes of gradients of activations, as far as they exceed the bytes that an update takes.

        These gradients live while all results are kept; the loss makes several of the size of its largest operand.
        Gradients of parameters and the values of an update come later, when the kept results are gone.
        """
        later = most = 0.0
        for read, kept, inside in self._backward_order:
            most = max(most, inside * self.share + sum(self.nbytes(v) / self._ranks(forms[v]) for v in read) - later)
            later += sum(self.held(v, forms[v]) for v in kept)
        return max(0.0, most - sum(self._update_bytes(v) / self._ranks(forms[v]) for v in self.given & self.trains))

    @cached_property
    def _backward_order(self) -> list[tuple[tuple[Value, ...], tuple[Value, ...], int]]:
        """Operators in the order of the backward pass, as (values with gradients, kept results, bytes inside)."""
        own, late, found = self.trains - self.given, self.late, list[tuple[tuple[Value, ...], tuple[Value, ...], int]]()
        for node, read in reversed([*self.reads.items()]):
            around = tuple(v for v in dict.fromkeys((*node.ins, *node.outs)) if v in own)
            found.append((around, tuple(v for v in node.outs if v in late), read.inside))
        return found

    def _update_bytes(self, v: Value) -> float:
        """Return the bytes of the gradient of a whole parameter and of its update."""
        saving = self.prices.saving if self.is_cut_by_zero(v) else NOTHING
        _, gradient, state = saving.parameter(self.prices.replicas)
        return v.nbytes * (gradient + UPDATE * state)

    def of_layers(self, options: Options, forms: Forms) -> Mapping[str, float]:
        """Return the bytes of each recomputed layer while it is recomputed."""
        layers: dict[str, float] = {}
        for v, layer in self.dropped.values.items():
            if v in self.late:
                layers[layer] = layers.get(layer, 0.0) + self.nbytes(v) / self._ranks(forms[v])
        for node, option in options.items() if layers else ():
            if (layer := self.dropped.layer(node)) is not None and self.reads[node].inside:
                layers[layer] = layers.get(layer, 0.0) + self._bytes_inside(node, option)
        return layers

    def _ranks(self, form: AxisForm) -> int:
        return self.prices.ranks if form.kind == "cut" else 1

    def nbytes(self, v: Value) -> float:
        """Return the bytes of a whole value; if it depends on the batch, of a replica's part of one piece."""
        return v.nbytes * (1.0 if v in self.given else self.share)

    def _bytes_in_flight(self, v: Value) -> float:
        """Return the bytes of a whole value; if it depends on the batch, of all microbatches in flight."""
        return self.nbytes(v) * (1.0 if v in self.given else self.prices.alive)

    @property
    def share(self) -> float:
        """Fraction of a batch that a replica works on at once."""
        return self.prices.share / self.prices.saving.accumulate

    @cached_property
    def dropped(self) -> RecomputedValues:
        return RecomputedValues(self.program, self.prices.saving)

    @cached_property
    def given(self) -> set[Value]:
        """Parameters and buffers."""
        return {i.value for i in self.program.inputs if i.role in ("parameter", "buffer")}

    @cached_property
    def late(self) -> set[Value]:
        """Results whose memory the backward pass reads, or that are inputs of recomputed layers."""
        views = {v: x for node in self.program.nodes for v, x in alias_pairs(node)}
        found, made = set[Value](), {v for node in self.program.nodes for v in node.outs}
        for v in self._values_read_back():
            root = v
            while root in views:
                root = views[root]
            found.add(root)
        return found & made

    def _values_read_back(self) -> Iterator[Value]:
        for node, read in self.reads.items():
            ins, outs = tensors_of(node.ins), tensors_of(node.outs)
            yield from (ins[n] for n in read.ins)
            yield from (outs[n] for n in read.outs)
            if self.dropped.layer(node) is not None:
                yield from (v for v in ins if v not in self.dropped.values)

    @cached_property
    def reads(self) -> Mapping[Node, BackwardReads]:
        """Values that each operator's backward pass reads."""
        return self.program.reads_back

    @cached_property
    def trains(self) -> frozenset[Value]:
        """Values that get a gradient."""
        return self.program.trained


def is_cut(way: Option) -> bool:
    """True if an option shards an operand or a result."""
    return any(form.kind == "cut" for form in (*way.needs, *way.gives))
