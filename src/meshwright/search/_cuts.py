"""How every operator of a captured model is best cut along one axis of ranks: exactly, by the rules' own choices.

The problem. Each operator has the options that its rule allows: a factor cut, pending sums passed on, or all repeated.
Each value takes one form on the axis (repeated, varying, cut along a dim, pending); what makes it is converted to that
once, and that into what each use needs, forward and, by duality, backward. The sum of the seconds of operators and
conversions and of what held bytes are worth is to be least.

It is a sum of tables over pairs of variables (an operator's option and a value's form), so it is minimised exactly
(`_eliminate`): a model is a long chain of narrow layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from meshwright.cost import Cluster
from meshwright.graph import Node, Operator, Program, Value, looked_at, map_values, tensor_dtype, work_of
from meshwright.layout import Dim, Shard, hint
from meshwright.spmd import REPEATED, Bound, Call, Choice, Held, RuleError, cut_choices, describe, dim_of, term_choices

from ._eliminate import Table, aligned, least, order_of
from ._errors import SearchError

T = TypeVar("T")
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]

AXIS = "axis"
EXPOSED = 0.3
"""The part of conversions of parameters, and of their gradients, that is not hidden behind operators."""
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
class Option:
    """One option of an operator: the forms that it needs of its operands and gives its results, and its seconds.

    Operands and results are those of `tensors_of`, each once, in order.
    """

    needs: tuple[Form, ...]
    gives: tuple[Form, ...]
    seconds: float


def tensors_of(values: Sequence[Value]) -> tuple[Value, ...]:
    """The tensors among values, each once."""
    return tuple(dict.fromkeys(v for v in values if v.is_tensor))


@dataclass(frozen=True, slots=True)
class Meeting:
    """A conversion that costs something: of which value, from and to which form, where; forward and backward."""

    value: Value
    have: Form
    need: Form
    nbytes: float
    seconds: float
    layer: str
    source: str = ""

    @property
    def kind(self) -> str:
        """The collective that carries it out: forward, or, where nothing meets there, backward."""
        return _collective(self.have, self.need) or _collective(_dual(self.need), _dual(self.have)) or "none"

    def __str__(self) -> str:
        return (
            f"{1e3 * self.seconds:9.3f} ms  {self.nbytes / 1e6:10.2f} MB  {self.have!r} to {self.need!r}: "
            f"{self.value!r} in {self.layer or 'the model'}"
        )


@dataclass(frozen=True)
class Cuts:
    """The best of all: seconds of a step, bytes of a rank, the option of every operator, the form of every value."""

    seconds: float
    nbytes: float
    program: Program = field(repr=False)
    options: Mapping[Node, Option] = field(repr=False)
    forms: Mapping[Value, Form] = field(repr=False)
    meetings: tuple[Meeting, ...] = field(default=(), repr=False)

    def worth(self, byte: float) -> float:
        """Seconds, and those that bytes are worth."""
        return self.seconds + byte * self.nbytes

    def of(self, v: Value) -> Form:
        """How a value of the model or of the batch should lie from the start: as all its uses need it."""
        if self.forms[v].kind == "cut":
            return self.forms[v]
        needs = {self.options[node].needs[tensors_of(node.ins).index(v)] for node in self.program.users.get(v, ())}
        (only, *others) = needs or {WHOLE}
        return only if not others and only.kind == "cut" else WHOLE

    def placements(self) -> dict[str, Shard | None]:
        """Parameter → the dim along which it is best cut, or None."""
        own = {i.name: self.of(i.value) for i in self.program.inputs if i.role == "parameter" and i.value in self.forms}
        return {name: Shard(form.dim) if form.kind == "cut" else None for name, form in own.items()}


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
        kind = _collective(have, need)
        return 0.0 if kind is None else float(self.cluster.meeting(kind, nbytes, self.ranks, self.together))


def _collective(have: Form, need: Form) -> Collective | None:
    """What ranks do for a conversion; nothing where each has what it needs."""
    if have == need or have in (WHOLE, VARYING):
        return None
    if have.kind == "cut":
        return "all-gather" if need.kind != "cut" else "all-to-all"
    return "reduce-scatter" if need.kind == "cut" else "all-reduce"


def _dual(form: Form) -> Form:
    """The form of the gradient of a value with this form."""
    return {WHOLE: WHOLE, VARYING: PENDING, PENDING: WHOLE}.get(form, form)


def cut(program: Program, prices: Prices, room: float = inf) -> Cuts:
    """The best cuts of the captured forward pass `program`, trained, along one axis of ranks, within `room` bytes.

    Where the fastest take more, bytes get a price (Lagrange): that at which the fastest cuts so far that fit and those
    that do not are worth the same, until none are better than both, or within `GAP`. What is found is the fastest of
    all that take no more bytes. Raises SearchError where nothing fits, and where values hang together too widely to
    look at all options.
    """
    problem = _Problem(program, prices)
    wide = problem.solved(prices.byte)
    if wide.nbytes <= room:
        return problem.told(wide)
    found = problem.solved(DEAR)
    if found.nbytes > room:
        raise SearchError(
            f"a model on {prices.ranks} ranks of {room / 1e9:.2f} GB", f"it takes {found.nbytes / 1e9:.2f} GB a rank",
            f"{(found.nbytes - room) / 1e9:.2f} GB are missing however it is cut", "more ranks, or a smaller batch",
        )  # fmt: skip
    while found.seconds > wide.seconds * (1 + GAP):
        byte = (found.seconds - wide.seconds) / (wide.nbytes - found.nbytes)
        tried = problem.solved(byte)
        if tried.worth(byte) >= found.worth(byte) * (1 - ENOUGH):
            break
        wide, found = (tried, found) if tried.nbytes > room else (wide, tried)
    return problem.told(found)


def every_cut(program: Program, prices: Prices) -> float:
    """What `cut` makes least (seconds, and bytes at their price), by looking at every combination of few operators."""
    return _Problem(program, prices).smallest(prices.byte)


class _Problem:
    """Variables: an option for each operator, then a form for each value. What is alike is worked out once."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices = program, prices
        self.trains = _trained(program)
        self._alike: dict[Any, Any] = {}
        self.options = {
            node: self._once(self._signature(node), lambda n=node: list(self._options(n))) for node in program.nodes
        }
        self.forms = self._forms()
        self.number = {v: len(self.options) + n for n, v in enumerate(self.forms)}
        self.sizes = [len(options) for options in self.options.values()] + [len(forms) for forms in self.forms.values()]
        self.tables = list(self._tables())
        self.order = order_of(self.sizes, self.tables)

    def solved(self, byte: float) -> Cuts:
        """The best where a held byte is worth `byte` seconds."""
        held = {v: self._held(v) for v in self.forms}
        priced = {id(costs): byte * costs for costs in held.values()}
        worth = [Table((self.number[v],), priced[id(costs)]) for v, costs in held.items()]
        value, chosen = least(self.sizes, [*self.tables, *worth], self.order)
        at = {v: chosen[self.number[v]] for v in self.forms}
        nbytes = sum(float(held[v][n]) for v, n in at.items())
        options = {node: options[chosen[n]] for n, (node, options) in enumerate(self.options.items())}
        forms = {v: forms[at[v]] for v, forms in self.forms.items()}
        return Cuts(value - byte * nbytes, nbytes, self.program, options, forms)

    def told(self, found: Cuts) -> Cuts:
        """A solution with its meetings."""
        return replace(found, meetings=tuple(self._met(found.options, found.forms)))

    def _met(self, options: Mapping[Node, Option], forms: Mapping[Value, Form]) -> Iterator[Meeting]:
        """The conversions of a solution that cost something."""
        for given in self.program.inputs:
            if given.value in forms:
                form = forms[given.value]
                yield from self._costly(given.value, form if form.kind == "cut" else WHOLE, form, given.name)
        for node, option in options.items():
            for v, have in zip(tensors_of(node.outs), option.gives, strict=True):
                yield from self._costly(v, have, forms[v], node.origin.layer, node.origin.where)
            for v, need in zip(tensors_of(node.ins), option.needs, strict=True):
                yield from self._costly(v, forms[v], need, node.origin.layer, node.origin.where)
        for v in self._results & set(forms):
            yield from self._costly(v, forms[v], WHOLE, "the end")

    def _costly(self, v: Value, have: Form, need: Form, layer: str, source: str = "") -> Iterator[Meeting]:
        seconds = float(self._conversions(v, (have,), (need,))[0, 0])
        if seconds > 0:
            yield Meeting(v, have, need, self._bytes(v), seconds, layer, source)

    def smallest(self, byte: float) -> float:
        """The least sum, found by looking at every combination at once."""
        total = np.zeros(self.sizes)
        held = [Table((self.number[v],), byte * self._held(v)) for v in self.forms]
        for table in (*self.tables, *held):
            total = total + aligned(table, tuple(range(len(self.sizes))))
        return float(total.min())

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        """What was made for an equal key, or what is made now: one object for all that are alike."""
        if key not in self._alike:
            self._alike[key] = make()
        return self._alike[key]

    # --- options

    def _signature(self, node: Node) -> Any:
        """What the options of an operator depend on."""
        place = {v: n for n, v in enumerate(dict.fromkeys(node.ins))}
        args, kwargs = map_values(lambda v: (place[v], v.sizes, v.dtype), (node.args, dict(node.kwargs)))
        return ("options", node.op, repr(args), repr(kwargs), tuple(v in self.trains for v in node.outs))

    def _options(self, node: Node) -> Iterator[Option]:
        """By the operator's rule; without one it runs on whole values."""
        work = work_of(node)
        device, share = self.prices.cluster.device, self.prices.share
        times = 1 + (BACKWARD if any(v in self.trains for v in node.outs) else 0)
        whole = device.seconds(work.flops * share, work.nbytes * share, work.dtype) * times if work.nbytes else 0.0
        operands, made = tensors_of(node.ins), tensors_of(node.outs)
        yield Option((WHOLE,) * len(operands), (WHOLE,) * len(made), whole)
        call = self._call(node)
        if call is None or len(call.bound.outs) != len(made):
            return
        given: list[Value | None] = call.operands(node.args, node.kwargs)
        name = node.op.name() if isinstance(node.op, Operator) else ""
        for choice in _choices(call.bound, self.prices.ranks):
            if name in WRITTEN and any(isinstance(h, str) for h in choice.outs):
                continue
            needs = _needs(call.bound, choice, given, self.prices.ranks)
            if needs is not None:
                gives = zip(choice.outs, call.bound.outs, strict=True)
                forms = tuple(_form(call.bound, held, dims, self.prices.ranks) for held, dims in gives)
                divided = whole / self.prices.ranks if choice.factor is not None else whole
                yield Option(tuple(needs.get(v, VARYING) for v in operands), forms, divided)

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

    def _forms(self) -> dict[Value, tuple[Form, ...]]:
        """Each value's forms: those that something makes or needs."""
        found: dict[Value, dict[Form, None]] = {}
        for given in self.program.inputs:
            if given.value.is_tensor:
                found[given.value] = {WHOLE: None}
        for node, options in self.options.items():
            operands, made = tensors_of(node.ins), tensors_of(node.outs)
            for option in options:
                for v, form in zip((*made, *operands), (*option.gives, *option.needs), strict=True):
                    found.setdefault(v, {WHOLE: None})[form] = None
        return {v: tuple(forms) for v, forms in found.items()}

    def _tables(self) -> Iterator[Table]:
        for n, (node, options) in enumerate(self.options.items()):
            yield Table(
                (n,), self._once(("seconds", id(options)), lambda w=options: np.array([option.seconds for option in w]))
            )
            for place, v in enumerate(tensors_of(node.outs)):
                given = tuple(option.gives[place] for option in options)
                yield Table((n, self.number[v]), self._conversions(v, given, self.forms[v]))
            for place, v in enumerate(tensors_of(node.ins)):
                needed = tuple(option.needs[place] for option in options)
                yield Table((self.number[v], n), self._conversions(v, self.forms[v], needed))
        for v in (i.value for i in self.program.inputs if i.value in self.forms):
            lies = [(form if form.kind == "cut" else WHOLE) for form in self.forms[v]]
            yield Table((self.number[v],), np.diagonal(self._conversions(v, tuple(lies), self.forms[v])))
        for v in self._results:
            if v in self.forms:
                yield Table((self.number[v],), self._conversions(v, self.forms[v], (WHOLE,))[:, 0])

    def _conversions(self, v: Value, have: tuple[Form, ...], need: tuple[Form, ...]) -> Any:
        """Seconds from each form to each other, forward and backward."""
        nbytes, trains = self._bytes(v), v in self.trains

        shown = EXPOSED if v in self._given else 1.0

        def one(a: Form, b: Form) -> float:
            return self._once((a, b, nbytes, trains), lambda: self.prices.convert(a, b, nbytes, trains))

        key = (have, need, nbytes, trains, shown)
        return self._once(key, lambda: shown * np.array([[one(a, b) for b in need] for a in have]))

    def _held(self, v: Value) -> Any:
        """Bytes of a value in each of its forms: a parameter with its gradient and state, a result that is kept."""
        times = (1 + STATE if v in self.trains else 1.0) if v in self._given else 1.0 if v in self._kept else 0.0
        forms, nbytes = self.forms[v], self._bytes(v) * times
        ranks = self.prices.ranks
        return self._once(
            ("held", forms, nbytes),
            lambda: np.array([nbytes / (ranks if form.kind == "cut" else 1) for form in forms]),
        )

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
DEAR, ENOUGH, GAP = 1.0, 1e-9, 1e-3
"""Seconds that a byte is worth where nothing else counts; the part of a sum that makes no difference; and how much
longer than the fastest cuts that do not fit those may take that do, before a better price is looked for."""
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
    """All options that a rule allows on so many ranks, with even parts."""
    for factor, size in enumerate(bound.sizes):
        if hint(size) % ranks == 0 and hint(size) > 1:
            yield from cut_choices(bound, factor)
    yield from term_choices(bound, (REPEATED,) * len(bound.ins))


def _needs(bound: Bound, choice: Choice, operands: Sequence[Value | None], ranks: int) -> dict[Value, Form] | None:
    """What a choice needs of each operand; None where it would need one in two forms at once."""
    needs: dict[Value, Form] = {}
    varies = any(need != REPEATED for need in choice.ins)
    for v, held, dims in zip(operands, choice.ins, bound.ins, strict=True):
        if v is None:
            continue
        form = _form(bound, held, dims, ranks)
        form = VARYING if form == WHOLE and varies else form
        if needs.setdefault(v, form) != form:
            return None
    return needs


def _form(bound: Bound, held: Held, dims: tuple[tuple[int, ...], ...], ranks: int) -> Form:
    if isinstance(held, str):
        return PENDING if held == "sum" else Form(held)
    at = next((d for d, factors in enumerate(dims) if held in factors), None)
    if at is None:
        return WHOLE
    return Form("cut", at, dim_of(dims[at], {held: (AXIS,)}, bound, {AXIS: ranks}))
