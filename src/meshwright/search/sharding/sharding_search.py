"""Exact search for the best sharding of every operator of a captured model along one axis of ranks.

The problem. Each operator has the options that its rule allows: shard a factor, pass on pending sums, or repeat all
work. Each value has one form on the axis: repeated, varying, cut along a dim, or pending. The value is converted once
from the form that its operator gives, and then to the form that each use needs. Gradients are converted the dual way in
the backward pass. The objective is the seconds of operators and conversions, plus the price of held bytes.

The objective is a sum of tables over pairs of variables (an operator's option and a value's form). A model is a long
chain of narrow layers, so variable elimination minimises the sum exactly (`variable_elimination`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, TypeVar

import numpy as np

from meshwright.graph import Node, Operator, Program, Value, work_of
from meshwright.layout import Shard
from meshwright.reshard import transposed
from meshwright.spmd import OperatorCall

from .._errors import SearchError
from ..plan_data.units import size_rounded_up
from .attention_options import ulysses_options
from .conversion_prices import EXPOSED, Prices
from .forms import VARYING, WHOLE, AxisForm, collective
from .memory_model import MemoryModel
from .memory_saving import MemorySaving
from .operator_options import Column, Forms, Option, OptionColumns, Options, choices, gives_of, needs_of, tensors_of
from .program_facts import OperatorRow, ProgramFacts
from .variable_elimination import MOST, Costs, Elimination, Table, aligned, elimination, least, order_of, total_cost

T = TypeVar("T")
BACKWARD = 2.0
"""Seconds of an operator's backward pass relative to its forward pass, if it has a backward pass."""


@dataclass(frozen=True, slots=True)
class PricedConversion:
    """A conversion that takes time: its value, the forms before and after, and its place in the model.

    `seconds` are those of the forward and the backward pass.
    """

    value: Value
    have: AxisForm
    need: AxisForm
    nbytes: float
    seconds: float
    layer: str
    source: str = ""
    node: Node | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The collective of the conversion: the forward one or, if the forward pass needs none, the backward one."""
        return collective(self.have, self.need) or collective(*transposed(self.have, self.need)) or "none"

    def __str__(self) -> str:
        return (
            f"{1e3 * self.seconds:9.3f} ms  {self.nbytes / 1e6:10.2f} MB  {self.have!r} to {self.need!r}: "
            f"{self.value!r} in {self.layer or 'the model'}"
        )


@dataclass(frozen=True)
class Shardings:
    """The best cuts that were found: the option of every operator and the form of every value.

    `seconds` are those of a step, `nbytes` those of a rank. `held` is the part of `nbytes` that is a sum over values;
    the search puts its price on these bytes. If the search was not exact, the optimum may be lower by `gap`, as a
    fraction of a lower bound.
    """

    seconds: float
    nbytes: float
    facts: ProgramFacts = field(repr=False)
    options: Options = field(repr=False)
    forms: Forms = field(repr=False)
    meetings: tuple[PricedConversion, ...] = field(default=(), repr=False)
    gap: float = 0.0
    held: float = 0.0

    @property
    def program(self) -> Program:
        return self.facts.program

    def worth(self, byte: float) -> float:
        """Return the Lagrangian: the seconds plus the price of the held bytes, at `byte` seconds each."""
        return self.seconds + byte * self.held

    def of(self, v: Value) -> AxisForm:
        """Return the initial form of a value of the model or of the batch.

        This is the form that all its uses need, or else whole.
        """
        if self.forms[v].kind == "cut":
            return self.forms[v]
        needs = {self.options[node].needs[tensors_of(node.ins).index(v)] for node in self.program.users.get(v, ())}
        (only, *others) = needs or {WHOLE}
        return only if not others and only.kind == "cut" else WHOLE

    def placements(self) -> dict[str, Shard | None]:
        """Return the dim along which each parameter is best sharded, or None."""
        own = {i.name: self.of(i.value) for i in self.program.inputs if i.role == "parameter" and i.value in self.forms}
        return {name: Shard(form.dim) if form.kind == "cut" else None for name, form in own.items()}


def best_shardings(program: Program, prices: Prices, memory_limit: float = inf) -> Shardings:
    """Return the best cuts of the captured forward pass `program`, for training along one axis of ranks.

    A rank holds at most `memory_limit` bytes. If the fastest cuts take more, bytes get a price (a Lagrange multiplier).
    At this price, the fastest cuts so far that fit and those that do not have equal value. The search ends if no cuts
    are better than both, or if their seconds differ by less than `GAP`. The result is the fastest of all cuts that take
    no more bytes.

    If too many values depend on each other, the search is not exact. The result is then the best that was found, and
    `gap` says how far it may be from the optimum.

    Raises:
        SearchError: no cuts fit.
    """
    return ShardingProblem(ProgramFacts(program), prices).within(memory_limit)


def least_by_enumeration(program: Program, prices: Prices) -> float:
    """Return the minimum of the objective of `best_shardings` over all combinations of options.

    The enumeration is for programs of few operators.
    """
    return ShardingProblem(ProgramFacts(program), prices).smallest(prices.byte)


class ShardingProblem:
    """Variables and tables of the search: an option for each operator, then a form for each value.

    Equal tables are computed once. Problems of the same operators may share the order of elimination and its steps,
    which depend on the variables of the tables alone (`shared`).
    """

    def __init__(self, facts: ProgramFacts, prices: Prices, shared: dict[Hashable, Any] | None = None) -> None:
        self.facts, self.prices, self.shared = facts, prices, {} if shared is None else shared
        self._memo: dict[Hashable, Any] = {}
        self.kept = MemoryModel(facts, prices, self._memoized)
        self.columns = [self._columns(row) for row in facts.rows]
        self.options = {row.node: own.options for row, own in zip(facts.rows, self.columns, strict=True)}
        self.forms = {v: self._forms(places) for v, places in facts.columns.items()}
        self.number = {v: len(self.options) + n for n, v in enumerate(self.forms)}
        self.sizes = [len(options) for options in self.options.values()] + [len(forms) for forms in self.forms.values()]
        self.tables = list(self._tables())
        self.held = list(self.kept.tables(self.columns, self.forms, self.number))

    def saving(self, how: MemorySaving) -> ShardingProblem:
        """Return the same problem with another stage of ZeRO."""
        return self.holding(replace(self.prices, saving=how))

    def holding(self, prices: Prices) -> ShardingProblem:
        """Return the same problem with prices that change only what is held: ZeRO, replicas, microbatches in flight."""
        if prices == self.prices:
            return self
        other = copy(self)
        for name in ("fastest", "_steps", "_distinct_held"):
            other.__dict__.pop(name, None)
        other.prices = prices
        other.kept = MemoryModel(self.facts, prices, self._memoized)
        other.held = list(other.kept.tables(self.columns, self.forms, self.number))
        return other

    def within(self, memory_limit: float) -> Shardings:
        """Return the fastest cuts that take no more than `memory_limit` bytes, as `best_shardings` does.

        Raises:
            SearchError: no cuts fit.
        """
        found = self.fitting(memory_limit)
        if found is None:
            least = max(self.fewest, self.solved(DEAR).nbytes if self.fewest <= memory_limit else 0.0)
            raise SearchError(
                f"a model on {self.prices.ranks} ranks of {size_rounded_up(memory_limit)}",
                f"the model needs {size_rounded_up(least)} per rank",
                f"{size_rounded_up(least - memory_limit)} are missing with every sharding",
                "use more ranks, or a smaller batch",
            )
        return found

    def fitting(self, memory_limit: float) -> Shardings | None:
        """Return the fastest cuts that take no more than `memory_limit` bytes, or None if no cuts fit."""
        found = self.best_of(lambda cuts: cuts if cuts.nbytes <= memory_limit else None, self.fewest <= memory_limit)
        return None if found is None else self.with_conversions(found)

    def best_of(self, fits: Callable[[Shardings], T | None], may: bool = True) -> T | None:
        """Return `fits(cuts)` for the fastest cuts for which it is not None; None if it is None for all.

        If it is None for the fastest cuts of all, and `may` allows it, bytes get a price as in `best_shardings`.
        """
        wide = self.fastest
        best = fits(wide)
        if best is not None or not may:
            return best
        narrow = self.solved(DEAR)
        best = fits(narrow)
        while best is not None and narrow.seconds > wide.seconds * (1 + GAP):
            byte = (narrow.seconds - wide.seconds) / (wide.held - narrow.held)
            tried = self.solved(byte)
            if tried.worth(byte) >= narrow.worth(byte) * (1 - ENOUGH):
                break
            found = fits(tried)
            wide, narrow, best = (tried, narrow, best) if found is None else (wide, tried, found)
        return best

    @cached_property
    def fastest(self) -> Shardings:
        """The best cuts if a held byte costs `prices.byte` seconds."""
        return self.solved(self.prices.byte)

    def solved(self, byte: float) -> Shardings:
        """Return the best cuts if a held byte costs `byte` seconds."""
        priced = {key: byte * costs for key, costs in self._distinct_held.items()}
        costs = [costs for _, costs in self.tables] + [priced[id(costs)] for _, costs in self.held]
        value, chosen, bound = least(self.sizes, [*self.tables, *self.held], self._steps, MOST, costs)
        nbytes = total_cost(self.held, chosen)
        options = {node: options[chosen[n]] for n, (node, options) in enumerate(self.options.items())}
        forms = {v: forms[chosen[self.number[v]]] for v, forms in self.forms.items()}
        total = nbytes + self.kept.temporary_bytes(options, forms) + self.kept.gradient_bytes(forms)
        return Shardings(
            value - byte * nbytes,
            total,
            self.facts,
            options,
            forms,
            gap=value / bound - 1 if bound > 0 else 0.0,
            held=nbytes,
        )

    @cached_property
    def _distinct_held(self) -> dict[int, Costs]:
        """The costs of `held`, each once, by id."""
        return {id(table.costs): table.costs for table in self.held}

    @cached_property
    def _steps(self) -> Elimination:
        numbers: dict[int, int] = {}
        kinds = tuple([numbers.setdefault(id(costs), len(numbers)) for _, costs in self.tables])
        key = tuple(self.sizes), kinds
        if key not in self.shared:
            self.shared[key] = order_of(self.sizes, self.tables, MOST)
        order = self.shared[key]
        held = id(order), tuple([variables for variables, _ in self.held])
        if held not in self.shared:
            self.shared[held] = elimination(self.sizes, [*self.tables, *self.held], MOST, order)
        return self.shared[held]

    @property
    def smallest_bytes(self) -> float:
        """The smallest `memory_limit` for which `within` finds cuts."""
        return min(self.fastest.nbytes, self.solved(DEAR).nbytes)

    @property
    def fewest(self) -> float:
        """A lower bound on the held bytes of every solution."""
        least = {key: float(costs.min()) for key, costs in self._distinct_held.items()}
        return sum(least[id(costs)] for _, costs in self.held)

    def with_conversions(self, found: Shardings) -> Shardings:
        """Return a solution with its conversions in `meetings`."""
        return replace(found, meetings=tuple(self._costly_conversions(found.options, found.forms)))

    def _costly_conversions(self, options: Options, forms: Forms) -> Iterator[PricedConversion]:
        """Yield the conversions of a solution that take time."""
        for given in self.facts.program.inputs:
            if given.value in forms:
                form = forms[given.value]
                yield from self._conversion_if_costly(given.value, _given_form(form), form, given.name)
        for row in self.facts.rows:
            node, option = row.node, options[row.node]
            for v, have in zip(row.outs, option.gives, strict=True):
                yield from self._conversion_if_costly(v, have, forms[v], node.origin.layer, node)
            for v, need in zip(row.ins, option.needs, strict=True):
                yield from self._conversion_if_costly(v, forms[v], need, node.origin.layer, node)
        for v in self._results:
            yield from self._conversion_if_costly(v, forms[v], WHOLE, "the end")

    def _conversion_if_costly(
        self, v: Value, have: AxisForm, need: AxisForm, layer: str, node: Node | None = None
    ) -> Iterator[PricedConversion]:
        seconds = self._times(v) * self._conversion_seconds(v, have, need)
        if seconds > 0:
            source = node.origin.where if node else ""
            yield PricedConversion(v, have, need, self.kept.nbytes(v), seconds, layer, source, node)

    def smallest(self, byte: float) -> float:
        """Return the minimum of the objective, from all combinations at once."""
        total = np.zeros(self.sizes)
        held = [Table(table.variables, byte * table.costs) for table in self.held]
        for table in (*self.tables, *held):
            total = total + aligned(table, tuple(range(len(self.sizes))))
        return float(total.min())

    def _memoized(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object that was made for an equal key, or make it now: one object for all equal tables."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    # --- options

    def _columns(self, row: OperatorRow) -> OptionColumns:
        again = row.node in self.kept.dropped.layers
        key = "options", row.signature, again
        return self._memoized(key, lambda: OptionColumns.of(self._options(row), self._interned))

    def _interned(self, column: Column) -> Column:
        """Return the same object for all equal columns, which may then be compared by identity."""
        return self._memoized(column, lambda: column)

    def _options(self, row: OperatorRow) -> Iterator[Option]:
        """Yield the options of an operator by its rule; without a rule, it runs on whole values."""
        node, work = row.node, work_of(row.node)
        device, share = self.prices.cluster.device, self.kept.share
        times = relative_passes(node, self.kept) * self.prices.saving.accumulate
        begun = device.overhead * times if work.nbytes else 0.0
        whole = times * device.seconds(work.flops * share, work.nbytes * share, work.dtype) if work.nbytes else 0.0
        yield Option((WHOLE,) * len(row.ins), (WHOLE,) * len(row.outs), whole)
        call = self.facts.call(row)
        if call is None or len(call.bound.outs) != len(row.outs):
            return
        ways = list(self._options_by_rule(node, call, whole, begun))
        yield from ways
        if "ulysses" in call.rule.alternatives:
            yield from ulysses_options(node, ways, self.prices.ranks, self._exchange_seconds)

    def _exchange_seconds(self, v: Value) -> float:
        """Return the seconds of resharding an operand or result along another dim, for all pieces of a batch."""
        return self.prices.exchanged(self.kept.nbytes(v), v in self.facts.trains) * self.prices.saving.accumulate

    def _options_by_rule(self, node: Node, call: OperatorCall, whole: float, begun: float) -> Iterator[Option]:
        operands, ranks = tensors_of(node.ins), self.prices.ranks
        name = node.op.name() if isinstance(node.op, Operator) else ""
        for choice in choices(call.bound, ranks):
            if name in WRITTEN and any(isinstance(h, str) for h in choice.outs):
                continue
            needs = needs_of(node, call, choice, ranks)
            if needs is not None:
                divided = begun + (whole - begun) / ranks if choice.factor is not None else whole
                given = tuple(needs.get(v, VARYING) for v in operands)
                yield Option(given, gives_of(call.bound, choice, ranks), divided)

    # --- forms

    def _forms(self, places: Sequence[tuple[int, str, int]]) -> Column:
        """Return the forms of a value: whole, and those that an option gives or needs."""
        columns = [getattr(self.columns[n], side)[at] for n, side, at in places]
        key = "forms", *map(id, columns)
        return self._memoized(key, lambda: self._interned(tuple(dict.fromkeys((WHOLE, *chain(*columns))))))

    def _tables(self) -> Iterator[Table]:
        for n, (row, own) in enumerate(zip(self.facts.rows, self.columns, strict=True)):
            yield Table((n,), own.seconds)
            for v, given in zip(row.outs, own.gives, strict=True):
                yield Table((n, self.number[v]), self._conversion_costs(v, given, self.forms[v]))
            for v, needed in zip(row.ins, own.needs, strict=True):
                yield Table((self.number[v], n), self._conversion_costs(v, self.forms[v], needed))
        yield from self._tables_of_inputs()
        for v in self._results:
            yield Table((self.number[v],), self._conversion_costs(v, self.forms[v], ONLY_WHOLE)[:, 0])

    def _tables_of_inputs(self) -> Iterator[Table]:
        """Yield the seconds of converting the inputs of the program from their given forms."""
        for given in self.facts.program.inputs:
            v = given.value
            if v in self.forms:
                forms = self.forms[v]
                have = self._memoized(
                    ("given", id(forms)), lambda forms=forms: self._interned(tuple(map(_given_form, forms)))
                )
                costs = self._conversion_costs(v, have, forms)
                yield Table(
                    (self.number[v],), self._memoized(("given", id(costs)), lambda costs=costs: np.diagonal(costs))
                )

    def _conversion_costs(self, v: Value, have: Column, need: Column) -> Costs:
        """Return the seconds from each form in `have` to each in `need`, forward and backward, as a matrix."""
        times = self._times(v)
        key = "converted", id(have), id(need), self.kept.nbytes(v), v in self.facts.trains, times
        return self._memoized(
            key, lambda: times * np.array([[self._conversion_seconds(v, a, b) for b in need] for a in have])
        )

    def _conversion_seconds(self, v: Value, have: AxisForm, need: AxisForm) -> float:
        """Return the seconds of one conversion, forward and backward."""
        nbytes, trains = self.kept.nbytes(v), v in self.facts.trains
        return self._memoized((have, need, nbytes, trains), lambda: self.prices.convert(have, need, nbytes, trains))

    def _times(self, v: Value) -> float:
        """Return how often a value is converted in a step; for a value of the model, the part that is not hidden."""
        return EXPOSED if v in self.facts.given else float(self.prices.saving.accumulate)

    @cached_property
    def _results(self) -> tuple[Value, ...]:
        """The results of the program that are tensors, each once."""
        return tuple(v for v in dict.fromkeys(self.facts.program.results) if v in self.forms)


def relative_passes(node: Node, kept: MemoryModel) -> float:
    """Return the seconds of all passes of an operator, relative to its forward pass.

    A frozen parameter has no gradient, which is half of the backward pass.
    """
    if kept.facts.trains.isdisjoint(node.outs):
        return 1.0
    backward = BACKWARD if kept.facts.frozen.isdisjoint(node.ins) else BACKWARD / 2
    return 1.0 + backward + (node in kept.dropped.layers)


def _given_form(form: AxisForm) -> AxisForm:
    """Return the form in which an input is given, if the program uses it in this form: sharded likewise, or whole."""
    return form if form.kind == "cut" else WHOLE


WRITTEN = frozenset({"aten::scaled_dot_product_attention"})
"""Operators whose options with pending results are skipped.

Their form for cut sums writes values to memory that the operator itself does not, which is never worth it.
"""
ONLY_WHOLE = (WHOLE,)
DEAR, ENOUGH, GAP = 1e-3, 1e-9, 1e-3
"""Constants of the search for a price of bytes.

`DEAR` is the price, in seconds per byte, at which only bytes count. `ENOUGH` is the relative difference of two
objectives that makes no difference. `GAP` is the relative difference in seconds, between the fastest cuts that fit and
the fastest that do not, at which the search ends.
"""
