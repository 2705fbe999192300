"""Check that a loss is the mean of its values on pieces of a batch, so that gradients may be accumulated over pieces.

The rows of a batch are followed through the operators, by their rules. Values that depend on rows stay separate by row
until a mean is taken. After that, only sums are allowed, and products with values that all pieces share. Batch norms,
sums over a batch, and products of two means fail the check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.graph import Node, Operator, Program, Value, alias_pairs, is_random_call
from meshwright.layout import hint
from meshwright.spmd import BoundRule, Choice, OperatorCall

from .forms import AXIS, PENDING, VARYING, WHOLE, AxisForm
from .operator_options import Forms, call_of, choices, gives_of, needs_of, tensors_of

MEAN = AxisForm("mean")
ROWS = AxisForm("cut", 0, (AXIS,))
TAKE_MEANS = frozenset({"aten::mean"})
LOSSES = {
    "aten::mse_loss": 2, "aten::l1_loss": 2, "aten::smooth_l1_loss": 2, "aten::huber_loss": 2,
    "aten::soft_margin_loss": 2, "aten::binary_cross_entropy": 3, "aten::binary_cross_entropy_with_logits": 4,
    "aten::cross_entropy_loss": 3, "aten::nll_loss": 3, "aten::nll_loss_nd": 3,
}  # fmt: skip
"""Losses that take the mean by default → the index of the argument that sets the reduction."""
APART = frozenset(
    f"aten::{name}"
    for name in (
        "reshape",
        "view",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "squeeze",
        "expand",
        "expand_as",
        "broadcast_to",
        "scaled_dot_product_attention",
        "group_norm",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
    )
)
"""Operators that their rule carries out by a function, and whose rows stay separate nevertheless."""
FRESH = frozenset(f"aten::{name}" for name in ("new_zeros", "new_ones", "new_full", "new_empty"))
"""Operators that read no numbers: their result is the same in all rows, or is written before it is read."""
IGNORING = frozenset({"aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd"})
"""Losses whose labels may be ignored or weighted, so that pieces may not count equally."""
ARGUMENTS, IGNORED = ("input", "target", "weight", "reduction", "ignore_index"), -100


@dataclass(frozen=True, slots=True)
class AccumulationCheck:
    """Result of the check: the reason against pieces, if there is one, and the labels that must not be ignored.

    `labels` are (index of a leaf of the batch, the number that is ignored). Pieces would count by the labels that are
    left. `draws` is true if the program draws random numbers.
    """

    why_not: str = ""
    labels: tuple[tuple[int, int], ...] = ()
    draws: bool = False

    @property
    def provided(self) -> Iterator[str]:
        """Conditions and effects of training in pieces, as sentences."""
        if self.labels:
            yield "no label is ignored"
        if self.draws:
            yield "each piece may draw its own random numbers"

    def ignores(self, leaves: Sequence[Any]) -> bool:
        """True if a batch has ignored labels; tensors on the meta device have no numbers and count as having none."""
        found = ((leaves[at], number) for at, number in self.labels)
        return any(x.device.type != "meta" and bool((x == number).any()) for x, number in found)


def check_accumulation(program: Program) -> AccumulationCheck:
    """Check if the captured loss is the mean of the losses of equal pieces of the batch."""
    rows = first_tensor_rows(program)
    pieces = next((n for n in range(2, rows + 1) if rows % n == 0), 1)
    return _Followed(program, pieces, rows).checked() if pieces > 1 else AccumulationCheck(f"the batch has {rows} row")


def first_tensor_rows(program: Program) -> int:
    """Return the number of rows of the first tensor of a batch that has dims."""
    batch = (i.value for i in program.inputs if i.role == "batch" and i.value.is_tensor)
    return next((hint(v.shape[0]) for v in batch if v.shape), 1)


@dataclass
class _Followed:
    program: Program
    pieces: int
    rows: int
    forms: dict[Value, AxisForm] = field(default_factory=dict[Value, AxisForm])
    labels: dict[int, int] = field(default_factory=dict[int, int])
    draws: bool = False

    def checked(self) -> AccumulationCheck:
        for given in self.program.inputs:
            v = given.value
            if given.role == "batch" and v.is_tensor and self._has_rows(v):
                self.forms[v] = ROWS
        for node in self.program.nodes:
            if any(v in self.forms for v in node.ins) and not self._follow(node):
                return AccumulationCheck(f"{node.op} in {node.origin.layer or 'the model'} depends on all rows at once")
        if any(v in self.forms for _, v in self.program.writes):
            return AccumulationCheck("the model stores values that depend on its batch")
        if any(self.forms.get(v) != MEAN for v in self.program.results):
            return AccumulationCheck("the loss is not a mean over the batch")
        return AccumulationCheck(labels=tuple(self.labels.items()), draws=self.draws)

    def _follow(self, node: Node) -> bool:
        """Record how the results of a node depend on rows; return False if no rule says so."""
        have = [self.forms.get(v, WHOLE) for v in tensors_of(node.ins)]
        summed = _means_as_sums(have)
        found = None if summed is None else self._result_forms(node, summed)
        if found is None:
            return False
        for v, form in zip(tensors_of(node.outs), found, strict=True):
            if form == PENDING and (MEAN in have or self._is_mean(node)):
                self.forms[v] = MEAN
            elif form != WHOLE:
                self.forms[v] = form
        return True

    def _result_forms(self, node: Node, have: Sequence[AxisForm]) -> Sequence[AxisForm] | None:
        """Return the forms of a node's results for operands with the forms `have`; None if no rule gives them."""
        if _operator_name(node) == "aten::dropout":
            self.draws = self.draws or bool(node.args[2])
            return have
        self.draws = self.draws or is_random_call(node)
        if _operator_name(node) in FRESH:
            return [ROWS if self._has_rows(v) else WHOLE for v in node.outs]
        call, made = call_of(node), tensors_of(node.outs)
        if (
            made
            and _operator_name(node) == "aten::broadcast_tensors"
            and len({v.sizes for v in (*node.ins, *made)}) == 1
        ):
            return have
        if call is None or len(call.bound.outs) != len(made):
            return None
        return self._forms_by_rule(node, call, have)

    def _has_rows(self, v: Value) -> bool:
        """True if the first dim of a tensor is as long as the batch."""
        return len(v.shape) > 0 and hint(v.shape[0]) == self.rows

    def _forms_by_rule(self, node: Node, call: OperatorCall, have: Sequence[AxisForm]) -> Sequence[AxisForm] | None:
        wanted = dict(zip(tensors_of(node.ins), have, strict=True))
        for choice in choices(call.bound, self.pieces):
            if self._fits_choice(node, call, choice, wanted):
                return gives_of(call.bound, choice, self.pieces)
        return None

    def _fits_choice(self, node: Node, call: OperatorCall, choice: Choice, wanted: Forms) -> bool:
        if self._has_form(call.bound, choice) and not (self._is_mean(node) or self._is_apart(node, choice)):
            return False
        needs = needs_of(node, call, choice, self.pieces)
        shared = (WHOLE, VARYING)
        return needs is not None and all(
            needs.get(v, VARYING) == form or (form in shared and needs.get(v, VARYING) in shared)
            for v, form in wanted.items()
        )

    def _has_form(self, bound: BoundRule, choice: Choice) -> bool:
        """True if a function carries out the choice, which may do anything."""
        return choice.factor is not None and bound.names[choice.factor] in bound.rule.forms

    def _is_apart(self, node: Node, choice: Choice) -> bool:
        return _operator_name(node) in APART and all(held == choice.factor for held in choice.outs)

    def _is_mean(self, node: Node) -> bool:
        name = _operator_name(node)
        if name not in LOSSES:
            return name in TAKE_MEANS
        at = LOSSES[name]
        reduction = node.args[at] if len(node.args) > at else node.kwargs.get("reduction", 1)
        if name not in IGNORING:
            return reduction == 1
        given = dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        leaf = self._batch_leaf(given["target"])
        if reduction != 1 or given.get("weight") is not None or leaf is None:
            return False
        self.labels[leaf] = given.get("ignore_index", IGNORED)
        return True

    def _batch_leaf(self, v: Value) -> int | None:
        """Return the index of the leaf of a batch that a value is a view of, or None."""
        while (node := self.program.producers.get(v)) is not None:
            seen = [x for made, x in alias_pairs(node) if made is v]
            if len(seen) != 1:
                return None
            (v,) = seen
        return next((i.source for i in self.program.inputs if i.value is v and i.role == "batch"), None)


def _means_as_sums(forms: Sequence[AxisForm]) -> Sequence[AxisForm] | None:
    """Return the forms with means as pending sums, which rules combine alike; None for sums that are no means."""
    if PENDING in forms:
        return None
    return [PENDING if form == MEAN else form for form in forms]


def _operator_name(node: Node) -> str:
    """Return the operator's name without its overload, or an empty text."""
    return node.op.name().partition(".")[0] if isinstance(node.op, Operator) else ""
