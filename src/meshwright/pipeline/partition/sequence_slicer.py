"""A captured forward pass in slices of its sequence: each operator runs once per slice, and may read earlier slices.

Slices are like the shards of one more mesh axis, and the same rules decide: a value is cut, whole, or a sum of terms.
But slices exchange no messages. A value that a slice needs of earlier slices is a value of the program, and so is its
gradient. A table runs F from the first slice to the last and B from the last to the first, so no operator may read a
later slice. An operator that would is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from meshwright.graph import (
    Draft,
    Node,
    Op,
    Operator,
    Program,
    StageSend,
    Value,
    is_random_call,
    map_values,
    name_of,
    values_in,
)
from meshwright.layout import TorchValue
from meshwright.spmd import BoundRule, OperatorCall, RuleError, describe, split_factor
from meshwright.spmd import factor_choices as ways_to_cut
from meshwright.tensor import STAGE_SPLIT, ReshardMark

from .._errors import StageError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """Dim `dim` has the size `before` · sequence · `after`; the sequence is cut into slices of these lengths."""

    dim: int
    before: int
    after: int
    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths[:-1], initial=0))

    def shape_of(self, whole: Sequence[int], n: int) -> list[int]:
        """Return the shape of slice n of a tensor of shape `whole`."""
        return [self.before * self.lengths[n] * self.after if d == self.dim else m for d, m in enumerate(whole)]


@dataclass(frozen=True, slots=True)
class ValueSlices:
    """A value with one value per slice."""

    cut: SequenceCut
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """A value that is the sum of one term per slice."""

    values: tuple[Value, ...]


Arguments = tuple[TorchValue, ...]
NamedArguments = Mapping[str, TorchValue]


@dataclass(frozen=True, slots=True)
class NodeCut:
    """A node, the operands of its bound rule, the factor along which they are cut, and the lengths of the slices."""

    node: Node
    operands: Sequence[Value | None]
    bound: BoundRule
    factor: int
    lengths: tuple[int, ...]

    def cut_of_operand(self, at: int) -> SequenceCut | None:
        """Return the cut that operand `at` needs; None if the operand stays whole."""
        for dim, factors in enumerate(self.bound.ins[at]):
            if self.factor in factors:
                return self.of_dim(dim, factors)
        return None

    def factors_of_result(self, at: int) -> tuple[tuple[int, ...], ...]:
        """Return the factors of each dim of result `at`."""
        outs = self.bound.outs
        return outs[at] if at < len(outs) else outs[-1]

    def of_dim(self, dim: int, factors: Sequence[int]) -> SequenceCut:
        """Return the cut of a dim that is the product of these factors."""
        at = factors.index(self.factor)
        before, after = (prod(self.bound.sizes[f] for f in part) for part in (factors[:at], factors[at + 1 :]))
        return SequenceCut(dim, before, after, self.lengths)


SlicedValue = Value | ValueSlices | Terms
SliceRule = Callable[["Slicer", Node], bool]
"""Cuts a node without its rule; returns False if the rule applies."""


def sliced(program: Program, lengths: Sequence[int], specials: Mapping[str, SliceRule]) -> Program:
    """Return the captured program in slices of these lengths; `specials` take precedence over rules."""
    found = Slicer(program, tuple(lengths), specials)
    if program.writes:
        raise found.refusal(
            "each slice would update it", f"the buffer {program.writes[0][0]!r}, which each batch updates"
        )
    for node in program.nodes:
        found.take(node)
    return found.finished()


class Slicer:
    """The sliced program so far, and the sliced form of each value of the original program."""

    def __init__(self, program: Program, lengths: tuple[int, ...], specials: Mapping[str, SliceRule]) -> None:
        self.program, self.lengths = program, lengths
        self.held: dict[Value, SlicedValue] = {i.value: i.value for i in program.inputs}
        self._specials = specials
        self._draft = Draft(replace(program, nodes=(), outputs=None, writes=()))
        for v in (v for node in program.nodes for v in node.outs):
            self._draft.names.fresh(v.name)
        self._slice_of: dict[Value, int] = {}
        self._given = {i.value for i in program.inputs if i.role == "batch"}
        self._learned = {i.value for i in program.inputs if i.role == "parameter"}
        self._stand_ins: dict[Value, Tensor] = {}
        self._cut_before: dict[tuple[Value, SequenceCut], tuple[Value, ...]] = {}
        self._entering: dict[Value, ValueSlices] = {}
        self._node: Node | None = None

    # --- the walk ------------------------------------------------------------------------------------------------

    def take(self, node: Node) -> None:
        """Slice the next node of the original program."""
        self._node = node
        if not self._is_cut(node):
            self._copy_whole(node)
        elif isinstance(node.op, (ReshardMark, StageSend)) or node.op is STAGE_SPLIT:
            (x,) = (self.held[v] for v in node.ins)
            assert isinstance(x, ValueSlices)
            self._copy_to_slices(node, x)
        else:
            special = self._specials.get(node.op._schema.name) if isinstance(node.op, Operator) else None
            if special is None or not special(self, node):
                self.by_rule(node)
        for known in (self._given, self._learned):
            if any(v in known for v in node.ins):
                known.update(node.outs)

    def finished(self) -> Program:
        if not any(isinstance(x, ValueSlices) for x in self.held.values()):
            raise self.refusal(
                "sequences must be dim 1 of the tensors of a batch",
                f"no operator that takes {self.lengths} of dim 1 of the batch and a parameter",
            )
        outputs = map_values(self.whole, self.program.outputs)
        nodes = tuple(Node(s.op, s.args, s.kwargs, s.out, s.origin) for s in self._draft)
        return Draft(replace(self.program, nodes=nodes, outputs=outputs)).finish()

    def _is_cut(self, node: Node) -> bool:
        """True if an operand is cut, or must be cut here: a whole sequence of the batch that meets a parameter."""
        if any(isinstance(self.held[v], ValueSlices) for v in node.ins):
            return True
        mixed = any(v in self._given and v in self._learned for v in node.ins)
        meets = any(v in self._learned for v in node.ins) and not mixed
        fits = [v for v in node.ins if v in self._given and len(v.shape) > 1 and v.shape[1] == sum(self.lengths)]
        self._entering = {v: self.cut(v, SequenceCut(1, 1, 1, self.lengths)) for v in fits} if meets else {}
        return bool(self._entering)

    def _copy_whole(self, node: Node) -> None:
        args, kwargs = map_values(self.whole, (node.args, dict(node.kwargs)))
        at = max((self._slice_of.get(v, 0) for v in values_in((args, kwargs))), default=0)
        self._draft.add_as(node.op, args, kwargs, node.out, self._draft.end, replace(node.origin, slice=at))
        self._slice_of.update(dict.fromkeys(node.outs, at))
        self.held |= {v: v for v in node.outs}

    def _copy_to_slices(self, node: Node, x: ValueSlices) -> None:
        (out,) = node.outs
        names = self._draft.names
        made = [Value(names.fresh(out.name), v.shape, v.dtype, v.device) for v in x.values]
        for n, (v, new) in enumerate(zip(x.values, made, strict=True)):
            self._draft.add_as(node.op, (v,), {}, new, self._draft.end, replace(node.origin, slice=n))
            self._slice_of[new] = n
        self.held[out] = ValueSlices(x.cut, tuple(made))

    # --- values --------------------------------------------------------------------------------------------------

    def add(self, n: int, op: Op, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        """Add a node of slice n and return its output. Raises StageError if it would read a value of a later slice."""
        assert self._node is not None
        ahead = next((v for v in values_in((args, kwargs)) if self._slice_of.get(v, 0) > n), None)
        if ahead is not None:
            raise self.refusal(f"slice {n} would need a value of the later slice {self._slice_of[ahead]}")
        out = self._draft.add(op, *args, before=self._draft.end, origin=replace(self._node.origin, slice=n), **kwargs)
        self._slice_of.update(dict.fromkeys(values_in(out), n))
        return out

    def whole(self, v: Value) -> Value:
        """Return the whole value; terms are added up in the order of the slices.

        Raises StageError if the value is cut.
        """
        held = self.held[v]
        if isinstance(held, Value):
            return held
        if isinstance(held, ValueSlices):
            raise self.refusal("it needs the whole sequence")
        self.held[v] = total = self.joined(held)
        return total

    def slice_of(self, v: Value) -> int:
        """Return the slice that completes a value that is not cut."""
        return self._slice_of.get(self.whole(v), 0)

    def joined(self, terms: Terms) -> Value:
        """Return the sum of the terms of all slices, in their order."""
        total = terms.values[0]
        for n, term in enumerate(terms.values[1:], 1):
            total = self.add(n, aten.add.Tensor, total, term)
        return total

    def cut(self, v: Value, cut: SequenceCut) -> ValueSlices:
        """Return a value in slices; a whole value is cut. Raises StageError if it is cut in another way."""
        held = self.held[v]
        if isinstance(held, ValueSlices):
            if held.cut != cut:
                raise self.refusal(f"sequences are split into {held.cut.lengths} and into {cut.lengths}")
            return held
        x = self.whole(v)
        if (x, cut) not in self._cut_before:
            pieces = (self._slice(x, cut, n) for n in range(len(cut.lengths)))
            self._cut_before[x, cut] = tuple(pieces)
        return ValueSlices(cut, self._cut_before[x, cut])

    def _slice(self, x: Value, cut: SequenceCut, n: int) -> Value:
        start = cut.starts[n]
        if cut.before == cut.after == 1:
            return self.add(n, aten.slice.Tensor, x, cut.dim, start, start + cut.lengths[n])
        d, shape = cut.dim, list(x.shape)
        apart = self.add(n, aten.reshape.default, x, [*shape[:d], cut.before, cut.total, cut.after, *shape[d + 1 :]])
        part = self.add(n, aten.slice.Tensor, apart, d + 1, start, start + cut.lengths[n])
        return self.add(n, aten.reshape.default, part, cut.shape_of(shape, n))

    # --- by the rules --------------------------------------------------------------------------------------------

    def by_rule(self, node: Node) -> None:
        """Cut a node along the factor that its operands are cut along."""
        cut = self.cut_of(node)
        local = self.local(cut)
        results: list[list[Value]] = []
        for n in range(len(cut.lengths)):
            args, kwargs = map_values(lambda v, n=n: local[v][n], (node.args, dict(node.kwargs)))
            for key in cut.bound.rule.sizes:
                args, kwargs = _with_size(args, kwargs, key, self.out_shape(cut, n))
            results.append(list(values_in(self.add(n, node.op, *args, **kwargs))))
        for at, v in enumerate(node.outs):
            values = tuple(row[at] for row in results)
            is_cut = any(cut.factor in factors for factors in cut.factors_of_result(at))
            self.held[v] = ValueSlices(self._out_cut(cut, at), values) if is_cut else Terms(values)

    def out_shape(self, cut: NodeCut, n: int) -> list[int]:
        """Return the shape of slice n of the first result."""
        return self._out_cut(cut, 0).shape_of(cut.node.outs[0].shape, n)

    def as_pieces(self, cut: NodeCut, made: Sequence[Value]) -> None:
        """Store the slices `made` as the single result of a node."""
        self.held[cut.node.outs[0]] = ValueSlices(self._out_cut(cut, 0), tuple(made))

    def cut_of(self, node: Node) -> NodeCut:
        """Return how a node is cut along a factor of its operands. Raises StageError if they are cut along several."""
        call = self._call_of(node)
        operands: Sequence[Value | None] = call.operands(node.args, node.kwargs)
        cuts = self._operand_cuts(operands)
        if not cuts:
            raise self.refusal("the sliced value is not an operand of the operator's rule")
        bound = call.bound
        for at, cut in cuts.items():
            bound = _split_product(bound, at, cut)
        factors = {_sequence_factor(bound, at, cut) for at, cut in cuts.items()}
        lengths = {cut.lengths for cut in cuts.values()}
        if len(factors) != 1 or None in factors or len(lengths) != 1:
            raise self.refusal("its operands are sliced along different dims")
        (factor,), (common_lengths,) = factors, lengths
        assert factor is not None
        return NodeCut(node, operands, bound, factor, common_lengths)

    def _operand_cuts(self, operands: Sequence[Value | None]) -> dict[int, SequenceCut]:
        """Return the cut of each operand that is in slices, by the position of the operand."""
        held = ((at, self._entering.get(v, self.held[v])) for at, v in enumerate(operands) if v is not None)
        return {at: x.cut for at, x in held if isinstance(x, ValueSlices)}

    def local(self, node_cut: NodeCut, known: bool = False) -> dict[Value, tuple[Value, ...]]:
        """Return each operand in each slice.

        Unless it is `known` that the node may be cut along the factor, its rule is checked first.
        """
        node, count = node_cut.node, len(node_cut.lengths)
        if is_random_call(node):
            raise self.refusal("it draws random numbers for the whole sequence")
        if not known and not _may_be_cut(node_cut.bound, node_cut.factor):
            raise self.refusal("it needs the whole sequence")
        found: dict[Value, tuple[Value, ...]] = {}
        for at, v in enumerate(node_cut.operands):
            if v is None:
                continue
            cut = node_cut.cut_of_operand(at)
            now = (self.whole(v),) * count if cut is None else self.cut(v, cut).values
            if found.setdefault(v, now) != now:
                raise self.refusal("an operand would be sliced along two dims")
        return found | {v: (self.whole(v),) * count for v in node.ins if v not in found}

    def _out_cut(self, cut: NodeCut, at: int) -> SequenceCut:
        """Return the cut of result `at`."""
        result = cut.factors_of_result(at)
        dims = [dim for dim, factors in enumerate(result) if cut.factor in factors]
        if len(dims) != 1 or len(result) != len(cut.node.outs[at].shape):
            raise self.refusal("its result is not sliced along one dim")
        return cut.of_dim(dims[0], result[dims[0]])

    def _call_of(self, node: Node) -> OperatorCall:
        args, kwargs = map_values(self.stand_in, (node.args, dict(node.kwargs)))
        try:
            call = describe(node.op, args, kwargs) if isinstance(node.op, Operator) else None
        except RuleError:
            call = None
        if call is None or call.mutated:
            raise self.refusal("it has no rule that says how to slice it")
        return call

    def stand_in(self, v: Value) -> Tensor | float:
        """Return a meta tensor of the shape of the whole value, or a number for a number."""
        if not isinstance(v.dtype, torch.dtype):
            return v.dtype(2)
        if v not in self._stand_ins:
            self._stand_ins[v] = torch.empty(v.shape, dtype=v.dtype, device="meta")
        return self._stand_ins[v]

    # --- errors --------------------------------------------------------------------------------------------------

    @property
    def _node_text(self) -> str:
        """Description of the node that is being cut: operator, module and the user's line."""
        assert self._node is not None
        origin = self._node.origin
        layer = f"in {origin.layer}" if origin.layer else ""
        return " ".join(filter(None, [name_of(self._node.op), layer, origin.where]))

    def refusal(self, why: str, found: str | None = None) -> StageError:
        """Return the error that names `found`, or the node that is being cut."""
        return StageError(
            f"{len(self.lengths)} slices of a sequence",
            found or self._node_text,
            why,
            "use operators that act on each position alone, and scaled_dot_product_attention(q, k, v, is_causal=True); "
            'or use a schedule of whole sequences, such as "1F1B"',
        )


def _with_size(
    args: Arguments, kwargs: NamedArguments, key: int | str, shape: list[int]
) -> tuple[Arguments, NamedArguments]:
    """Return the arguments with the sizes at position or name `key` replaced, if they are given."""
    if isinstance(key, int) and key < len(args):
        return (*args[:key], shape, *args[key + 1 :]), kwargs
    if isinstance(key, str) and key in kwargs:
        return args, {**kwargs, key: shape}
    return args, kwargs


def _may_be_cut(bound: BoundRule, factor: int) -> bool:
    """True if the rule computes each slice of the results from slices, or terms of the results."""
    if bound.names[factor] in bound.rule.forms or factor in bound.whole:
        return False
    return any("sum" not in way.ins and {*way.outs} <= {factor, "sum"} for way in ways_to_cut(bound, factor))


def _split_product(bound: BoundRule, at: int, cut: SequenceCut) -> BoundRule:
    """Return `bound` with the factor of a dim split, if the dim is a product of which the sequence is one factor."""
    factors = bound.ins[at][cut.dim] if cut.dim < len(bound.ins[at]) else ()
    sizes = tuple(n for n in (cut.before, cut.total, cut.after) if n != 1)
    if len(factors) != 1 or len(sizes) < 2 or bound.sizes[factors[0]] != prod(sizes):
        return bound
    return split_factor(bound, factors[0], sizes)


def _sequence_factor(bound: BoundRule, at: int, cut: SequenceCut) -> int | None:
    """Return the factor of operand `at` that is its sequence; None if there is none."""
    factors = bound.ins[at][cut.dim] if cut.dim < len(bound.ins[at]) else ()
    before = 1
    for f in factors:
        if before == cut.before and bound.sizes[f] == cut.total:
            return f
        before *= bound.sizes[f]
    return None
