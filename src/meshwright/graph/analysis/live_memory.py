"""Liveness and memory of a program: values that share memory, and the live bytes at each node.

Inputs are live throughout. A value is live from the node that produces it to the last node that reads it or a value in
the same memory. Results are live to the end. Temporary memory inside an operator is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, product

from meshwright.layout import TorchValue
from meshwright.reshard import Exchange, Fill, View

from .._errors import RewriteError
from ..program.effects import writes_to
from ..program.node import (
    Conversion,
    Node,
    Op,
    Overwrite,
    Start,
    Value,
    Wait,
    WriteToCopies,
    argument_at,
    name_of,
    values_in,
)
from ..program.program import Program
from ..torch_hooks import Operator

SECRET_VIEWS = {
    f"aten::{name}"
    for name in (
        "_unsafe_view",
        "reshape",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "broadcast_tensors",
        "meshgrid",
        "cartesian_prod",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "sum_to_size",
        "conj_physical",
        "type_as",
    )
}
"""Operators whose results may share the memory of the first argument, although their schemas do not say so."""


def _drops_nothing(x: Value, p: float = 0.5, train: bool = True) -> bool:
    return p == 0 or not train


SECRET_VIEWS_OF: dict[str, Callable[..., bool]] = {
    "aten::einsum": lambda equation, operands, path=None: len(operands) == 1,
    **dict.fromkeys(
        ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"), _drops_nothing
    ),
}
"""Such operators that share memory only for some arguments, with a predicate on the arguments."""


def alias_pairs(node: Node) -> Iterator[tuple[Value, Value]]:
    """Yield (result, argument) for each pair that may share memory."""
    op = node.op
    if isinstance(op, Conversion):
        if _keeps_the_part(op):
            yield from product(node.outs, node.ins)
    elif isinstance(op, Wait):
        yield from product(node.outs, node.args[:1])
    elif isinstance(op, Overwrite):
        yield from _overwritten_pairs(op, node)
    elif isinstance(op, Operator):
        yield from _pairs_by_schema(op, node)
    elif not isinstance(op, (WriteToCopies, Start)):
        yield from ((v, x) for v, x in product(node.outs, node.ins) if v.is_tensor and x.is_tensor)


def _overwritten_pairs(op: Overwrite, node: Node) -> Iterator[tuple[Value, Value]]:
    for number, argument in enumerate(_arguments_at(node, op.places)):
        result = node.out if len(op.places) == 1 else node.out[number]
        yield from zip(values_in(result), values_in(argument), strict=True)


def _keeps_the_part(op: Conversion) -> bool:
    """True if running the step may return the local tensor itself."""
    if isinstance(op.step, Fill):
        return op.step.op not in ("sum", "prod")
    return isinstance(op.step, View) or (isinstance(op.step, Exchange) and not op.communicates)


def _pairs_by_schema(op: Operator, node: Node) -> Iterator[tuple[Value, Value]]:
    secret = SECRET_VIEWS_OF.get(op._schema.name)
    if op._schema.name in SECRET_VIEWS or (secret is not None and secret(*node.args, **node.kwargs)):
        yield from product(node.outs, values_in(node.args))
        return
    places = _aliased_places(op)
    results: Sequence[TorchValue] = [node.out] if len(places) == 1 else node.out or ()
    for result, aliased in zip(results, places, strict=True):
        if aliased:
            yield from product(values_in(result), values_in(_arguments_at(node, aliased)))


@lru_cache(maxsize=4096)
def _aliased_places(op: Operator) -> tuple[tuple[int | str, ...], ...]:
    """Return, for each result of an operator, the arguments whose memory it may share by the schema."""
    infos = [r.alias_info for r in op._schema.returns]
    return tuple(() if info is None else _places_in_memory(op, info.before_set) for info in infos)


def _places_in_memory(op: Operator, names: set[str]) -> tuple[int | str, ...]:
    """Return the arguments in a memory of one of these names; all with a named memory if there are no names.

    The schema has no names for the result if it is a list of tensors.
    """
    return tuple(
        a.name if a.kwarg_only else at
        for at, a in enumerate(op._schema.arguments)
        if a.alias_info is not None and (a.alias_info.before_set & names or not names)
    )


def _arguments_at(node: Node, places: Sequence[int | str]) -> list[TorchValue]:
    return [argument_at(place, node.args, node.kwargs) for place in places]


def _written_values(node: Node) -> Iterator[Value]:
    """Yield the values that the node overwrites."""
    return values_in(_arguments_at(node, writes_to(node.op)))


@dataclass(slots=True)
class AliasClasses:
    """Union-find of values that share memory. `of` returns the representative: the value that was added first."""

    _above: dict[Value, Value] = field(default_factory=dict[Value, Value])
    _order: dict[Value, int] = field(default_factory=dict[Value, int])

    def add(self, v: Value) -> None:
        self._above[v] = v
        self._order[v] = len(self._order)

    def of(self, v: Value) -> Value:
        top = v
        while self._above[top] is not top:
            top = self._above[top]
        while self._above[v] is not top:
            self._above[v], v = top, self._above[v]
        return top

    def join(self, a: Value, b: Value) -> None:
        """Note that both values share memory."""
        a, b = self.of(a), self.of(b)
        if self._order[a] > self._order[b]:
            a, b = b, a
        self._above[b] = a


def alias_classes(program: Program) -> AliasClasses:
    """Return the groups of a program's values that share memory, or may share it."""
    found = AliasClasses()
    for given in program.inputs:
        found.add(given.value)
    for node in program.nodes:
        for v in node.outs:
            found.add(v)
        for v, x in alias_pairs(node):
            found.join(v, x)
    return found


@dataclass(frozen=True)
class LiveMemory:
    """Live bytes at each node: `held` by inputs, `live[i]` in total at node i."""

    program: Program = field(repr=False)
    held: int
    live: tuple[int, ...] = field(repr=False)
    spans: Mapping[Value, tuple[int, int]] = field(repr=False)
    """Value with memory of its own → first and last node at which it is live."""

    @cached_property
    def at(self) -> int:
        """The first node with the peak memory."""
        return max(range(len(self.live)), key=self.live.__getitem__, default=0)

    @property
    def peak(self) -> int:
        return max(self.live, default=self.held)

    def peak_in(self, *phases: str) -> int:
        """Return the peak memory in bytes at the nodes of the given phases of the step."""
        found = zip(self.program.nodes, self.live, strict=True)
        return max((live for node, live in found if node.origin.phase in phases), default=self.held)

    def alive(self, at: int | None = None) -> tuple[Value, ...]:
        """Return the live values with own memory at a node (default: the peak), largest first, without held inputs."""
        here = self.at if at is None else at
        found = [v for v, (first, last) in self.spans.items() if first <= here <= last]
        return tuple(sorted(found, key=lambda v: -v.nbytes))

    def __str__(self) -> str:
        if not self.live:
            return f"{self.held:,} bytes of inputs"
        node = self.program.nodes[self.at]
        where = " ".join(filter(None, [node.origin.phase, node.origin.layer]))
        return (
            f"{self.peak:,} bytes at {name_of(node.op)} ({where}), node {self.at} of {len(self.live)}: "
            f"{self.held:,} of inputs, {self.peak - self.held:,} of values"
        )


def live_memory(program: Program, released: Collection[Value] = ()) -> LiveMemory:
    """Return the live memory at each node. Inputs in `released` are live only until their last read."""
    found = alias_classes(program)
    last = _last_reads(program, found)
    freed = {found.of(v) for v in released}
    spans: dict[Value, tuple[int, int]] = {}
    for v, first in _values_with_memory(program):
        root = found.of(v)
        if first >= 0 or root in freed:
            spans[v] = (max(first, 0), max(last.get(root, first), first))
    held = sum(given.value.nbytes for given in program.inputs if given.value not in spans)
    steps = [0] * (len(program.nodes) + 1)
    for v, (first, end) in spans.items():
        steps[first] += v.nbytes
        steps[min(end + 1, len(program.nodes))] -= v.nbytes
    _, *live = accumulate(steps[:-1], initial=held)
    return LiveMemory(program, held, tuple(live), spans)


def _values_with_memory(program: Program) -> Iterator[tuple[Value, int]]:
    """Yield the values with memory of their own, and the index of the node that produces each; -1 for inputs."""
    yield from ((given.value, -1) for given in program.inputs if given.value.is_tensor)
    for at, node in enumerate(program.nodes):
        borrowed = {v for v, _ in alias_pairs(node)} if _has_known_memory(node.op) else set[Value]()
        yield from ((v, at) for v in node.outs if v.is_tensor and v not in borrowed)


def _has_known_memory(op: Op) -> bool:
    """False for Python functions: it is unknown if their results have memory of their own."""
    return isinstance(op, (Conversion, Start, Wait, Overwrite, WriteToCopies, Operator))


def _last_reads(program: Program, found: AliasClasses) -> dict[Value, int]:
    last: dict[Value, int] = {}
    for at, node in enumerate(program.nodes):
        for v in (*node.ins, *node.outs):
            last[found.of(v)] = at
    for v in program.results:
        last[found.of(v)] = len(program.nodes)
    return last


def read_last(program: Program) -> set[Node]:
    """Return the nodes after which the memory of their first operand is not read.

    Inputs never count, since the caller may read them.
    """
    found = alias_classes(program)
    last = _last_reads(program, found)
    given = {found.of(i.value) for i in program.inputs}
    operands = ((at, node, found.of(node.ins[0])) for at, node in enumerate(program.nodes) if node.ins)
    return {node for at, node, root in operands if last[root] == at and root not in given}


def written_inputs(program: Program) -> set[Value]:
    """Return the inputs that nodes of the program overwrite."""
    writing = _writing_nodes(program)
    if not writing:
        return set()
    found = alias_classes(program)
    roots = {found.of(x) for node in writing for x in _written_values(node)}
    return {given.value for given in program.inputs if found.of(given.value) in roots}


def _writing_nodes(program: Program) -> list[Node]:
    """Return the nodes that overwrite an operand."""
    return [node for node in program.nodes if writes_to(node.op)]


def refuse_writing(program: Program, asked: str) -> None:
    """Raise RewriteError if a node overwrites an operand, because the nodes of such a program cannot be reordered."""
    writing = _writing_nodes(program)
    if writing:
        raise RewriteError(
            asked,
            f"{name_of(writing[0].op)}, which overwrites an operand",
            "the overwritten value is lost, so nodes can neither move nor run again",
            "apply InPlace as the last pass",
        )


def overwritten(program: Program) -> Iterator[tuple[str, str, str]]:
    """Yield the violations of the rules for in-place nodes, as (where, what, why).

    The old content of overwritten memory must not be read. Nodes may overwrite only inputs that the program writes
    back.
    """
    if not _writing_nodes(program):
        return
    memory, stale = _SharedMemory(), set[Value]()
    memory.add(given.value for given in program.inputs)
    unwritten = memory.members.keys() - dict(program.writes)
    for node in program.nodes:
        late = [v for v in node.ins if v in stale]
        yield from ((name_of(node.op), repr(v), "it is read after its memory was overwritten") for v in late)
        yield from _wrong_writes(node, memory, unwritten)
        stale.update(*map(memory.shared_with, _written_values(node)))
        memory.add_results(node)
    yield from (("return", repr(v), "its memory was overwritten") for v in program.results if v in stale)


def _wrong_writes(node: Node, memory: _SharedMemory, unwritten: set[Value]) -> Iterator[tuple[str, str, str]]:
    """Yield the violations by the writes of one node; `unwritten` are the inputs that the program does not write."""
    name = name_of(node.op)
    for x in _written_values(node):
        shared = memory.shared_with(x)
        yield from ((name, repr(v), "the program does not write it back") for v in shared & unwritten)
        others = [v for v in node.ins if v in shared and v is not x]
        yield from ((name, repr(v), f"it may share the memory of {x!r}, which is written to") for v in others)


@dataclass(slots=True)
class _SharedMemory:
    """The values so far, grouped by the memory that they may share."""

    classes: AliasClasses = field(default_factory=AliasClasses)
    members: dict[Value, set[Value]] = field(default_factory=dict[Value, set[Value]])
    """Representative of a class → the values of the class."""

    def shared_with(self, v: Value) -> set[Value]:
        """Return the values that may share the memory of `v`, which is one of them."""
        return self.members[self.classes.of(v)]

    def add(self, values: Iterable[Value]) -> None:
        """Add values that share their memory with no other value."""
        for v in values:
            self.classes.add(v)
            self.members[v] = {v}

    def add_results(self, node: Node) -> None:
        """Add the results of a node."""
        self.add(node.outs)
        for v, x in alias_pairs(node):
            mine, other = self.members.pop(self.classes.of(v)), self.members.pop(self.classes.of(x), set[Value]())
            self.classes.join(v, x)
            self.members[self.classes.of(v)] = mine | other
