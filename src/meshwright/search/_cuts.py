"""How every operator of a captured model is best cut along one axis of ranks: exactly, by the rules' own choices.

The problem. Each operator has the ways that its rule allows: a factor cut, pending sums passed on, or all repeated.
Each value takes one form on the axis (repeated, varying, cut along a dim, pending); what makes it is converted to that
once, and that into what each use needs, forward and, by duality, backward. The sum of the seconds of operators and
conversions and of what held bytes are worth is to be least.

It is a sum of tables over pairs of variables (an operator's way and a value's form), so it is minimised exactly
(`_eliminate`): a model is a long chain of narrow layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import torch

from meshwright.cost import Cluster
from meshwright.graph import Node, Operator, Program, Value, looked_at, map_values, tensor_dtype, work_of
from meshwright.layout import Dim, Shard, hint
from meshwright.spmd import REPEATED, Bound, Call, Choice, Held, RuleError, cut_choices, describe, dim_of, term_choices

from ._eliminate import Table, least
from ._errors import SearchError

AXIS = "axis"
BACKWARD = 2.0
"""How many times as long as its forward pass an operator's backward pass takes, where there is one."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a value lies along the axis: repeated, varying (each rank uses it differently), pending, or cut."""

    kind: str
    dim: int = -1
    cut: Dim = ()

    def __repr__(self) -> str:
        return f"cut {self.dim}" if self.kind == "cut" else self.kind


WHOLE, VARYING, PENDING = Form("repeated"), Form("varying"), Form("sum")


@dataclass(frozen=True)
class Way:
    """One way of an operator: what it needs of its operands, what it gives, and its seconds."""

    needs: tuple[tuple[Value, Form], ...]
    gives: tuple[tuple[Value, Form], ...]
    seconds: float


@dataclass(frozen=True)
class Cuts:
    """The best of all ways: seconds of a step, bytes that a rank holds, and the form of every value."""

    seconds: float
    nbytes: float
    forms: Mapping[Value, Form] = field(repr=False)

    def placements(self, program: Program) -> dict[str, Shard | None]:
        """Parameter → the dim along which it is best cut, or None."""
        found: dict[str, Shard | None] = {}
        for given in program.inputs:
            form = self.forms.get(given.value, WHOLE)
            if given.role == "parameter":
                found[given.name] = Shard(form.dim) if form.kind == "cut" else None
        return found


@dataclass(frozen=True)
class Prices:
    """What the axis is: its ranks, of which `together` share a node; the part of a batch that a rank of it has.

    `byte` is what a held byte is worth, in seconds.
    """

    cluster: Cluster
    ranks: int
    together: int
    share: float = 1.0
    byte: float = 0.0

    def convert(self, have: Form, need: Form, nbytes: float, trains: bool) -> float:
        """Seconds of a conversion, and of its transpose where a gradient comes back."""
        return self._one(have, need, nbytes) + (self._one(_dual(need), _dual(have), nbytes) if trains else 0.0)

    def _one(self, have: Form, need: Form, nbytes: float) -> float:
        if have == need or have in (WHOLE, VARYING):
            return 0.0
        if have.kind == "cut":
            kind = "all-gather" if need.kind != "cut" else "all-to-all"
        else:
            kind = "reduce-scatter" if need.kind == "cut" else "all-reduce"
        return float(self.cluster.meeting(kind, nbytes, self.ranks, self.together))


def _dual(form: Form) -> Form:
    """The form of the gradient of a value with this form."""
    return {WHOLE: WHOLE, VARYING: PENDING, PENDING: WHOLE}.get(form, form)


def cut(program: Program, prices: Prices, room: float = inf) -> Cuts:
    """The best way to cut the captured forward pass `program`, trained, along one axis of ranks, within `room` bytes.

    Where the fastest way takes more, bytes get a price (Lagrange), which is raised until it fits: what is found is the
    fastest of all ways that take no more bytes than it. Raises SearchError where no price is high enough, and where
    values hang together too widely to look at all ways.
    """
    problem = _Problem(program, prices)
    found = problem.solved(prices.byte)
    if found.nbytes <= room:
        return found
    low, high = DEAR / 2**ROUNDS, DEAR
    found = problem.solved(high)
    if found.nbytes > room:
        raise SearchError(
            f"a model on {prices.ranks} ranks of {room / 1e9:.2f} GB", f"it takes {found.nbytes / 1e9:.2f} GB a rank",
            f"{(found.nbytes - room) / 1e9:.2f} GB are missing however it is cut", "more ranks, or a smaller batch",
        )  # fmt: skip
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        tried = problem.solved(middle)
        if tried.nbytes > room:
            low = middle
        else:
            high = middle
            found = min(found, tried, key=lambda c: c.seconds)
    return found


class _Problem:
    """Variables: a way for each operator, then a form for each value."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices = program, prices
        self.trains = _trained(program)
        self.ways = {node: list(self._ways(node)) for node in program.nodes}
        self.forms = self._forms()
        self.number = {v: len(self.ways) + n for n, v in enumerate(self.forms)}
        self.sizes = [len(ways) for ways in self.ways.values()] + [len(forms) for forms in self.forms.values()]
        self.tables = list(self._tables())

    def solved(self, byte: float) -> Cuts:
        """The best where a held byte is worth `byte` seconds."""
        held = [Table((self.number[v],), byte * self._held(v)) for v in self.forms]
        value, chosen = least(self.sizes, [*self.tables, *held])
        at = {v: chosen[self.number[v]] for v in self.forms}
        nbytes = sum(float(self._held(v)[n]) for v, n in at.items())
        return Cuts(value - byte * nbytes, nbytes, {v: forms[at[v]] for v, forms in self.forms.items()})

    # --- ways

    def _ways(self, node: Node) -> Iterator[Way]:
        """By the operator's rule; without one it runs on whole values."""
        work = work_of(node)
        device, share = self.prices.cluster.device, self.prices.share
        times = 1 + (BACKWARD if any(v in self.trains for v in node.outs) else 0)
        whole = device.seconds(work.flops * share, work.nbytes * share, work.dtype) * times if work.nbytes else 0.0
        tensors = [v for v in node.ins if v.is_tensor]
        made = [v for v in node.outs if v.is_tensor]
        yield Way(tuple((v, WHOLE) for v in dict.fromkeys(tensors)), tuple((v, WHOLE) for v in made), whole)
        call = self._call(node)
        if call is None:
            return
        operands: list[Value | None] = call.operands(node.args, node.kwargs)
        name = node.op.name() if isinstance(node.op, Operator) else ""
        for choice in _choices(call.bound, self.prices.ranks):
            if name in WRITTEN and any(isinstance(h, str) for h in choice.outs):
                continue
            divided = whole / self.prices.ranks if choice.factor is not None else whole
            way = _way(call.bound, choice, operands, made, divided, self.prices.ranks)
            if way is not None:
                yield way

    def _call(self, node: Node) -> Call | None:
        if not isinstance(node.op, Operator):
            return None
        args, kwargs = map_values(_stand_in, (node.args, dict(node.kwargs)))
        try:
            call = describe(node.op, args, kwargs)
        except RuleError:
            return None
        return None if call is None or call.mutated else call

    # --- forms

    def _forms(self) -> dict[Value, list[Form]]:
        """Each value's forms: those that something makes or needs."""
        found: dict[Value, dict[Form, None]] = {}
        for given in self.program.inputs:
            if given.value.is_tensor:
                found[given.value] = {WHOLE: None}
        for ways in self.ways.values():
            for way in ways:
                for v, form in (*way.gives, *way.needs):
                    found.setdefault(v, {WHOLE: None})[form] = None
        return {v: list(forms) for v, forms in found.items()}

    def _tables(self) -> Iterator[Table]:
        for n, (node, ways) in enumerate(self.ways.items()):
            yield Table((n,), np.array([way.seconds for way in ways]))
            for v in dict.fromkeys(u for u in node.outs if u.is_tensor):
                given = [dict(way.gives)[v] for way in ways]
                yield Table((n, self.number[v]), self._conversions(v, given, self.forms[v]))
            for v in dict.fromkeys(u for u in node.ins if u.is_tensor):
                needed = [dict(way.needs).get(v, VARYING) for way in ways]
                yield Table((self.number[v], n), self._conversions(v, self.forms[v], needed))
        for v in self._results & set(self.forms):
            yield Table((self.number[v],), self._conversions(v, self.forms[v], [WHOLE])[:, 0])

    def _conversions(self, v: Value, have: list[Form], need: list[Form]) -> Any:
        nbytes = self._bytes(v)
        return np.array([[self.prices.convert(a, b, nbytes, v in self.trains) for b in need] for a in have])

    def _held(self, v: Value) -> Any:
        """Bytes of a value in each of its forms: a parameter with its gradient and state, a result that is kept."""
        parts = np.array([self.prices.ranks if form.kind == "cut" else 1 for form in self.forms[v]])
        times = (1 + STATE if v in self.trains else 1.0) if v in self._given else 1.0 if v in self._kept else 0.0
        return self._bytes(v) * times / parts

    @cached_property
    def _kept(self) -> set[Value]:
        """Results that have memory of their own, and a gradient: what a backward pass may need."""
        views = {v for node in self.program.nodes for v, _ in looked_at(node)}
        return {v for v in self.trains if v not in views and v not in self._given}

    def _bytes(self, v: Value) -> float:
        return v.nbytes * (1.0 if v in self._given else self.prices.share)

    @cached_property
    def _given(self) -> set[Value]:
        return {i.value for i in self.program.inputs if i.role in ("parameter", "buffer")}

    @cached_property
    def _results(self) -> set[Value]:
        return set(self.program.results)


WRITTEN = frozenset({"aten::scaled_dot_product_attention"})
"""Operators whose form for cut sums writes down what the operator itself does not: never worth it."""
DEAR, ROUNDS = 1e-6, 24
"""Seconds that a byte is worth at most, and how often the price is halved on the way to the right one."""
STATE = 4.0
"""Bytes that a parameter's gradient and optimizer take, per byte of it."""


def _trained(program: Program) -> set[Value]:
    """Values that a gradient comes to."""
    found = {i.value for i in program.inputs if i.role == "parameter" and tensor_dtype(i.value).is_floating_point}
    for node in program.nodes:
        if not found.isdisjoint(node.ins):
            found |= {v for v in node.outs if v.is_tensor and tensor_dtype(v).is_floating_point}
    return found


def _stand_in(v: Value) -> Any:
    """What a rule looks at: a tensor's shape, or a number."""
    if not isinstance(v.dtype, torch.dtype):
        return v.dtype(2)
    return torch.empty([hint(n) for n in v.shape], dtype=v.dtype, device="meta")


def _choices(bound: Bound, ranks: int) -> Iterator[Choice]:
    """All ways that a rule allows on so many ranks, with even parts."""
    for factor, size in enumerate(bound.sizes):
        if hint(size) % ranks == 0 and hint(size) > 1:
            yield from cut_choices(bound, factor)
    yield from term_choices(bound, (REPEATED,) * len(bound.ins))


def _way(
    bound: Bound, choice: Choice, operands: list[Value | None], made: list[Value], seconds: float, ranks: int
) -> Way | None:
    """A choice as forms; None where an operand would need two at once, or a result is no tensor of the rule."""
    needs: dict[Value, Form] = {}
    varies = any(need != REPEATED for need in choice.ins)
    for v, held, dims in zip(operands, choice.ins, bound.ins, strict=True):
        if v is None:
            continue
        form = _form(bound, held, dims, ranks)
        form = VARYING if form == WHOLE and varies else form
        if needs.setdefault(v, form) != form:
            return None
    if len(choice.outs) != len(made):
        return None
    gives = tuple((v, _form(bound, h, dims, ranks)) for v, h, dims in zip(made, choice.outs, bound.outs, strict=True))
    return Way(tuple(needs.items()), gives, seconds)


def _form(bound: Bound, held: Held, dims: tuple[tuple[int, ...], ...], ranks: int) -> Form:
    if isinstance(held, str):
        return PENDING if held == "sum" else Form(held)
    at = next((d for d, factors in enumerate(dims) if held in factors), None)
    if at is None:
        return WHOLE
    return Form("cut", at, dim_of(dims[at], {held: (AXIS,)}, bound, {AXIS: ranks}))
