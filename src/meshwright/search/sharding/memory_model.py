"""Bytes that a rank holds: parameters with gradients and states, and results kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol, TypeVar

import numpy as np

from meshwright.graph import Value
from meshwright.layout import hint
from meshwright.passes import Bucket

from .conversion_prices import Prices
from .forms import AxisForm, collective
from .memory_saving import LEAST, NOTHING, MemorySaving
from .operator_options import Column, Forms, Option, OptionColumns, Options, PossibleForms
from .program_facts import OperatorRow, ProgramFacts, RecomputedValues
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

    facts: ProgramFacts
    prices: Prices
    once: Once

    def tables(
        self,
        columns: Sequence[OptionColumns],
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
            yield Table((number[v],), self._bytes_by_form(forms, self._held[v]))
        for n, (row, own) in enumerate(zip(self.facts.rows, columns, strict=True)):
            yield from self._tables_inside(n, row, own)
            for v, given in zip(row.outs, own.gives, strict=True):
                if self._is_sent_out(v):
                    costs = self._sent_by_form(v, given, forms_of[v], into=True)
                    yield from () if costs is None else (Table((n, number[v]), costs),)
            for place, (v, needed) in enumerate(zip(row.ins, own.needs, strict=True)):
                if self._is_sent_in(v, row, place):
                    costs = self._sent_by_form(v, forms_of[v], needed)
                    yield from () if costs is None else (Table((number[v], n), costs),)

    def _tables_inside(self, n: int, row: OperatorRow, own: OptionColumns) -> Iterator[Table]:
        """Yield the bytes inside an operator that its backward pass reads, if there are any."""
        if row.reads.inside and row.node not in self.dropped.layers:
            key = "inside", id(own), row.reads.inside
            yield Table((n,), self.once(key, lambda: np.array([self._bytes_inside(row, way) for way in own.options])))

    def made_at(self, row: OperatorRow, option: Option, forms: Forms) -> float:
        """Return the bytes that live from an operator until the backward pass: its results, and what is sent for it."""
        pairs = [(v, give, forms[v]) for v, give in zip(row.outs, option.gives, strict=True) if self._is_sent_out(v)]
        needs = enumerate(zip(row.ins, option.needs, strict=True))
        pairs += [(v, forms[v], need) for n, (v, need) in needs if self._is_sent_in(v, row, n)]
        sent = sum(self._sent_bytes(v, have, need) for v, have, need in pairs)
        inside = 0.0 if row.node in self.dropped.layers else self._bytes_inside(row, option)
        return sent + inside + sum(self.held(v, forms[v]) for v in row.outs)

    def held(self, v: Value, form: AxisForm) -> float:
        """Return the bytes of a value that a rank holds beyond a single operator or layer."""
        return self._held[v] / self._ranks(form)

    def _is_sent_out(self, v: Value) -> bool:
        """True if the result of a communication that makes a value is kept, though the value is recomputed."""
        return v in self.dropped.values and v in self.dropped.late

    def _is_sent_in(self, v: Value, row: OperatorRow, place: int) -> bool:
        """True if an operand that was communicated for an operator is kept."""
        if v in self.facts.given:
            return v in self.facts.trains and self.prices.saving.zero != 3
        return place in row.reads.ins or (row.node in self.dropped.layers and v in self.facts.trains)

    def fewest_inside(self, row: OperatorRow, ways: Sequence[Option]) -> float:
        """Return the bytes inside an operator, under the option that holds least."""
        return min(self._bytes_inside(row, way) for way in ways) if row.reads.inside else 0.0

    def _bytes_inside(self, row: OperatorRow, way: Option) -> float:
        """Return the bytes that an operator's backward pass reads and that are in no value of the program.

        Ranks that have parts of the operator share them.
        """
        return row.reads.inside * self.share / (self.prices.ranks if is_cut(way) else 1)

    def _sent_by_form(self, v: Value, have: Column, need: Column, into: bool = False) -> Costs | None:
        """Return the bytes of a value after each conversion, as a matrix; None if ranks communicate for none."""

        def costs() -> Costs | None:
            found = np.array([[self._sent_bytes(v, a, b) for b in need] for a in have])
            return found if found.any() else None

        return self.once(("sent", id(have), id(need), self._bytes_in_flight(v), into), costs)

    def _sent_bytes(self, v: Value, have: AxisForm, need: AxisForm) -> float:
        """Return the bytes of a value after a conversion; 0 if ranks do not communicate for it."""
        return 0.0 if collective(have, need) is None else self._bytes_in_flight(v) / self._ranks(need)

    def _bytes_by_form(self, forms: Column, nbytes: float) -> Costs:
        return self.once(("held", id(forms), nbytes), lambda: np.array([nbytes / self._ranks(form) for form in forms]))

    @cached_property
    def _held(self) -> Mapping[Value, float]:
        """Bytes of each whole value that a rank holds beyond a single operator or layer."""
        return {v: self._held_bytes(v) for v in self.facts.columns}

    def _held_bytes(self, v: Value) -> float:
        if v in self.facts.given:
            nbytes = self.facts.nbytes[v]
            return nbytes * self._bytes_per_parameter_byte(v) if v in self.facts.trains else float(nbytes)
        return self._bytes_in_flight(v) if v in self.dropped.late and v not in self.dropped.values else 0.0

    def _bytes_per_parameter_byte(self, v: Value) -> float:
        """Return the bytes of a parameter, its gradient and its states on a rank, per byte of the parameter."""
        saving = self.prices.saving if self.is_cut_by_zero(v) else NOTHING
        return per_byte(saving, self.prices.replicas, self.prices.states)

    def is_cut_by_zero(self, v: Value) -> bool:
        """True if ZeRO shards a parameter; small ones stay whole."""
        return prod(map(hint, v.shape)) >= LEAST

    def temporary_bytes(self, options: Options, forms: Forms) -> float:
        """Return the temporary bytes of a recomputed layer, and of parameters and gradients in communication."""
        buckets = self._buckets_in_flight
        cut = (v for v in self.parameters if self.is_cut_by_zero(v)) if buckets else ()
        whole = [self.facts.nbytes[v] / self._ranks(forms[v]) for v in cut]
        row = max(max(whole, default=0.0), min(Bucket.bytes, sum(whole)))
        return max(self.of_layers(options, forms).values(), default=0.0) + buckets * row

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
        ranks = {v: self._ranks(form) for v, form in forms.items()}
        later = most = 0.0
        for read, kept, inside in self.dropped.backward_order:
            most = max(most, inside * self.share + sum([self._nbytes[v] / ranks[v] for v in read]) - later)
            later += sum([self._held[v] / ranks[v] for v in kept])
        return max(0.0, most - sum(self._update_bytes(v) / ranks[v] for v in self.parameters))

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        """The parameters that get a gradient and that an operator reads, in order."""
        return tuple(v for v in self.facts.columns if v in self.facts.given and v in self.facts.trains)

    def _update_bytes(self, v: Value) -> float:
        """Return the bytes of the gradient of a whole parameter and of its update."""
        saving = self.prices.saving if self.is_cut_by_zero(v) else NOTHING
        _, gradient, state = saving.parameter(self.prices.replicas)
        return self.facts.nbytes[v] * (gradient + UPDATE * state)

    def of_layers(self, options: Options, forms: Forms) -> Mapping[str, float]:
        """Return the bytes of each recomputed layer while it is recomputed."""
        layers: dict[str, float] = {}
        for v, layer in self.dropped.values.items():
            if v in self.dropped.late:
                layers[layer] = layers.get(layer, 0.0) + self._nbytes[v] / self._ranks(forms[v])
        for row in self._rows_with_bytes_inside if layers else ():
            if (layer := self.dropped.layers.get(row.node)) is not None:
                layers[layer] = layers.get(layer, 0.0) + self._bytes_inside(row, options[row.node])
        return layers

    @cached_property
    def _rows_with_bytes_inside(self) -> list[OperatorRow]:
        return [row for row in self.facts.rows if row.reads.inside]

    def _ranks(self, form: AxisForm) -> int:
        return self.prices.ranks if form.kind == "cut" else 1

    def nbytes(self, v: Value) -> float:
        """Return the bytes of a whole value; if it depends on the batch, of a replica's part of one piece."""
        return self._nbytes[v]

    @cached_property
    def _nbytes(self) -> Mapping[Value, float]:
        given, share = self.facts.given, self.share
        return {v: nbytes * (1.0 if v in given else share) for v, nbytes in self.facts.nbytes.items()}

    def _bytes_in_flight(self, v: Value) -> float:
        """Return the bytes of a whole value; if it depends on the batch, of all microbatches in flight."""
        return self._nbytes[v] * (1.0 if v in self.facts.given else self.prices.alive)

    @property
    def share(self) -> float:
        """Fraction of a batch that a replica works on at once."""
        return self.prices.share / self.prices.saving.accumulate

    @cached_property
    def dropped(self) -> RecomputedValues:
        return self.facts.recomputed(self.prices.saving.recompute)


def is_cut(way: Option) -> bool:
    """True if an option shards an operand or a result."""
    return any(form.kind == "cut" for form in (*way.needs, *way.gives))
