"""Patterns of rules: the operators that `find` calls, with names for the parts that may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from meshwright.layout import TorchValue

from .._errors import RewriteError
from ..program.draft import Spot
from ..program.node import Node, Op, Value, name_of
from .node_reader import CAST, Operand, Reader, Reading, VirtualValue, argument_names, full_arguments
from .rule_arguments import RuleVariant, Shape, sample_sizes
from .rule_trace import CallTrace, trace_calls
from .spellings import aten

COMMUTE: set[Op] = {
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
    aten.logical_and.default,
    aten.logical_or.default,
}
"""Operators that commute in their first two arguments."""


DIMS = {"dim", "dims", "dim0", "dim1", "axis"}
"""Names of arguments that are dims: -1 and the last dim are equal."""

ANY = {"device", "pin_memory", "layout", "memory_format", "non_blocking", "copy"}
"""Names of arguments that a rule does not compare."""

ConstantPosition = tuple[int, ...]
"""Position of a constant: number of the call, then the path to the argument."""


@dataclass(frozen=True, slots=True)
class Name:
    """A tensor argument of the rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """An attribute of the rule; if `name` is empty, a constant that `find` computes from shapes or attributes.

    `flip` means the reciprocal.
    """

    name: str
    at: ConstantPosition
    flip: bool = False

    def flipped(self) -> Constant:
        return replace(self, flip=not self.flip)

    def undone(self, found: TorchValue) -> TorchValue:
        """Return the constant for a matched argument: its reciprocal if `flip` is set."""
        return 1 / found if self.flip else found


@dataclass(frozen=True, eq=False)
class Term:
    """Result `place` of a call. `number` is the number of the call in `find`, -1 for a call of another spelling."""

    op: Op
    args: tuple[TorchValue, ...]
    place: int
    number: int

    @cached_property
    def commutes(self) -> bool:
        return self.op in COMMUTE and self.args[2:] in ((), (1,))

    @cached_property
    def order(self) -> tuple[tuple[int, bool], ...]:
        """Positions of the arguments to compare, each with True if the argument is a dim.

        The order is by selectivity: constants, then operators, then names, which match everything.
        """
        names = argument_names(self.op)
        places = [at for at in range(len(self.args)) if at >= len(names) or names[at] not in ANY]
        cost = {
            at: 2 if isinstance(a, Name) else int(isinstance(a, (Term, list, tuple))) for at, a in enumerate(self.args)
        }
        dims = {
            at for at in places if at < len(names) and names[at] in DIMS and not isinstance(self.args[at], Constant)
        }
        return tuple((at, at in dims) for at in sorted(places, key=cost.__getitem__))

    def __repr__(self) -> str:
        return f"{name_of(self.op)}{self.args}"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Pattern of one variant of a rule; `roots` are its results.

    It was made from the trace `told` of `find`; `others` are traces of `find` for other constants and shapes.
    """

    variant: RuleVariant
    roots: tuple[Term, ...]
    told: CallTrace
    terms: tuple[Term, ...] = field(repr=False)
    others: tuple[CallTrace, ...] = field(repr=False)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The operators that `find` calls."""
        return tuple(call.op for call in self.told.calls)

    @cached_property
    def entrances(self) -> tuple[tuple[Op, frozenset[frozenset[int]]], ...]:
        """Operators that may produce the first root, each with its needs: sets of ids of operators.

        Some operand must be readable as an operator of each set. A cast at the root may be absent, so the operator
        below it is included.
        """
        found: list[tuple[Op, frozenset[frozenset[int]]]] = []
        term: TorchValue = self.roots[0]
        while isinstance(term, Term):
            found.append((term.op, frozenset(filter(None, map(_makers, term.args)))))
            term = term.args[0] if term.op is CAST else None
        return tuple(found)


def _makers(a: TorchValue) -> frozenset[int]:
    """Return the ids of the operators that may produce an operand; empty for any. A cast may be absent."""
    if not isinstance(a, Term):
        return frozenset()
    if a.op is not CAST:
        return frozenset([id(a.op)])
    inner = _makers(a.args[0])
    return inner | {id(CAST)} if inner else inner


def stand_ins(variant: RuleVariant, shapes: Mapping[str, Shape], other: bool = False) -> dict[str, Value]:
    """Return a value for every tensor argument: a square matrix if the argument has no shape."""
    sizes = sample_sizes(shapes, other)
    dtypes = {"float": torch.bfloat16, "int": torch.int64, "bool": torch.bool}
    square = Shape(("6", "6") if other else ("4", "4"))
    shape_of = {name: shapes.get(name, square) for name in variant.tensors}
    return {name: Value(name, shape.sized(sizes), dtypes[shape.kind]) for name, shape in shape_of.items()}


def sample_arguments(variant: RuleVariant, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return one value for every argument of a rule."""
    return {
        **variant.given,
        **{a.name: a.samples[0] for a in variant.attributes},
        **stand_ins(variant, shapes),
    }


def make_pattern(find: Callable[..., Any], variant: RuleVariant, shapes: Mapping[str, Shape], rule: str) -> Pattern:
    """Return the pattern of a variant, from traces of `find`.

    `find` is traced once, and again for a second value of each attribute and for other shapes. Raises RewriteError if
    the traces have different operators.
    """
    given = sample_arguments(variant, shapes)
    told = trace_calls(find, given)
    others: list[_OtherTrace] = []
    for a in variant.attributes:
        first, second = a.samples[0], a.samples[1]
        others.append(_OtherTrace(trace_calls(find, given | {a.name: second}), a.name, first, second))
    others.append(_OtherTrace(trace_calls(find, given | stand_ins(variant, shapes, other=True))))
    for other in others:
        if [c.op for c in other.trace.calls] != [c.op for c in told.calls]:
            raise RewriteError(
                f"rule {rule}",
                f"other operators for another {other.name or 'shape'}",
                "a pattern must have the same operators for all arguments",
                "where `find` branches, use an argument with options, such as `kind: Literal['relu', 'gelu']`",
            )
    return _PatternMaker(told, others, rule).pattern(variant)


@dataclass(frozen=True, slots=True)
class _OtherTrace:
    """Trace of `find` for the value `second` of the attribute `name` instead of `first`; without a name, for shapes."""

    trace: CallTrace
    name: str = ""
    first: TorchValue = None
    second: TorchValue = None

    def explains(self, constant: TorchValue, other: TorchValue) -> bool:
        """True if a constant of `find` and that of this trace are the two values of the attribute."""
        return bool(self.name) and _same_tree(constant, self.first) and _same_tree(other, self.second)


@dataclass(slots=True)
class _PatternMaker:
    told: CallTrace
    others: list[_OtherTrace]
    rule: str
    terms: dict[Operand, Term | Name] = field(default_factory=dict[Operand, "Term | Name"])
    producers: dict[Value, Spot] = field(default_factory=dict[Value, Spot])
    numbers: dict[int, int] = field(default_factory=dict[int, int])

    def pattern(self, variant: RuleVariant) -> Pattern:
        for number, call in enumerate(self.told.calls):
            marked = self._marked_call(number, call)
            self.numbers[id(marked)] = number
            self.producers.update((v, marked) for v in call.outs)
        reader = Reader(self.producers.get)
        out = self.told.out
        results = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        roots = tuple(self._term(reader, v) for v in results)
        if not roots or not all(isinstance(r, Term) for r in roots):
            raise RewriteError(
                f"rule {self.rule}",
                f"find returns {out!r}",
                "an operator must make every result of find",
                "return the result of the last operator of the pattern, or a tuple of results",
            )
        self._check_names(variant, roots)
        terms = tuple(term for term in self.terms.values() if isinstance(term, Term))
        return Pattern(variant, roots, self.told, terms, tuple(other.trace for other in self.others))

    def _marked_call(self, number: int, call: Node) -> Spot:
        full = full_arguments(call.op, call.args, call.kwargs)
        args = tuple(self._marked((number, at), a) for at, a in enumerate(full))
        return Spot(call.op, args, {}, call.out, call.origin)

    def _marked(self, at: ConstantPosition, tree: TorchValue) -> TorchValue:
        """Return `tree` with names for the constants that differ in other traces of `find`."""
        if isinstance(tree, Value):
            return tree
        constants = [(other, constant_at(other.trace, at)) for other in self.others]
        changed = [(other, constant) for other, constant in constants if not _same_tree(constant, tree)]
        if not changed:
            return tree
        other, constant = changed[0]
        if len(changed) == 1 and other.explains(tree, constant):
            return Constant(other.name, at)
        if all(_are_equally_long(tree, constant) for _, constant in changed):
            return type(tree)([self._marked((*at, i), item) for i, item in enumerate(tree)])
        return Constant("", at)

    def _term(self, reader: Reader, v: TorchValue) -> TorchValue:
        if isinstance(v, (list, tuple)):
            return type(v)([self._term(reader, item) for item in v])
        if not isinstance(v, (Value, VirtualValue)):
            return v
        if v not in self.terms:
            reading = reader.normal(v)
            if reading is None:
                assert isinstance(v, Value)
                self.terms[v] = Name(v.name)
            else:
                args = tuple(self._term(reader, a) for a in (*reading.args, *_named_dtype(reading)))
                self.terms[v] = Term(reading.op, args, reading.place, self.numbers.get(id(reading.call), -1))
        return self.terms[v]

    def _check_names(self, variant: RuleVariant, roots: tuple[Term, ...]) -> None:
        used = {leaf.name for leaf in leaves(roots) if isinstance(leaf, (Name, Constant))}
        wanted = {*variant.tensors, *(a.name for a in variant.attributes)}
        if wanted - used:
            raise RewriteError(
                f"rule {self.rule}",
                f"find does not use {', '.join(sorted(wanted - used))}",
                "an unused argument cannot be matched",
                "pass the argument to an operator unchanged",
            )


def _named_dtype(reading: Reading) -> tuple[Constant, ...]:
    """Return the dtype of a cast if it is an argument of the rule."""
    if reading.op is not CAST or reading.call is None:
        return ()
    return tuple(a for a in reading.call.args if isinstance(a, Constant) and a.name)


def leaves(tree: TorchValue) -> Iterator[TorchValue]:
    """Yield the names and constants below terms."""
    if isinstance(tree, Term):
        yield from leaves(tree.args)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def constant_at(told: CallTrace, at: ConstantPosition) -> TorchValue:
    """Return the argument at a position: number of the call, then the path to the argument."""
    call = told.calls[at[0]]
    found: TorchValue = full_arguments(call.op, call.args, call.kwargs)[at[1]]
    for step in at[2:]:
        found = found[step]
    return found


def _same_tree(a: TorchValue, b: TorchValue) -> bool:
    if isinstance(a, Value) or isinstance(b, Value):
        return isinstance(a, Value) and isinstance(b, Value)
    if _are_equally_long(a, b):
        return all(map(_same_tree, a, b))
    return type(a) is type(b) and a == b


def _are_equally_long(a: TorchValue, b: TorchValue) -> bool:
    """True for two lists or tuples of equal length."""
    return isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b)
