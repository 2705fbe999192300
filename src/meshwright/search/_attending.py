"""How attention goes along a sequence that is cut: keys and values gathered, or by "ulysses", heads cut instead.

The first is what the rule of attention says of queries that are cut. The second is an option of its own: operands and
result are cut along the sequence, all to all makes heads of that and back, and the heads' option computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.graph import Node, Operator, Value
from meshwright.layout import hint
from meshwright.tensor import Context

from ._forms import AXIS, Form
from ._ways import Option, tensors_of

ATTENTION = "aten::scaled_dot_product_attention"
SEQUENCE, HEADS = 2, 3
"""Dims of queries, keys, values and results, counted from the last."""
SAID: Mapping[Context, str] = {
    "gather": "queries are cut along the sequence, keys and values gathered",
    "ulysses": "heads are cut in the place of the sequence, all to all, and back (ulysses)",
}


def exchanged(node: Node, options: Sequence[Option], ranks: int, price: Callable[[Value], float]) -> Iterator[Option]:
    """Attention by "ulysses", where there are heads enough; `price` tells the seconds of an exchange there and back."""
    operands, made = tensors_of(node.ins), tensors_of(node.outs)
    given = node.ins[:3]
    lengths = {hint(v.shape[-SEQUENCE]) for v in given if len(v.shape) >= HEADS}
    if len(lengths) != 1 or lengths.pop() % ranks or len({len(v.shape) for v in (*given, *made)}) != 1:
        return
    rest = [v for v in operands if v not in given]
    for option in options:
        needs = dict(zip(operands, option.needs, strict=True))
        if all(_has_heads(v, needs[v]) for v in given) and not any(needs[v].kind == "cut" for v in rest):
            along = {v: _along(v) for v in given}
            seconds = option.seconds + sum(map(price, (*given, *made)))
            yield Option(tuple(along.get(v, needs[v]) for v in operands), tuple(map(_along, made)), seconds)
            return


def attending(options: Mapping[Node, Option]) -> Counter[Context]:
    """How many attentions go along a sequence that is cut, by which name."""
    return Counter(_ways(options))


def said(found: Counter[Context]) -> list[str]:
    """The same as sentences."""
    return [f"context parallel: in {n} attention{'s' * (n > 1)} {SAID[name]}" for name, n in found.items()]


def _ways(options: Mapping[Node, Option]) -> Iterator[Context]:
    for node, option in options.items():
        if is_attention(node) and option.needs[0] == _along(node.ins[0]):
            key = option.needs[tensors_of(node.ins).index(node.ins[1])]
            yield "ulysses" if key.kind == "cut" else "gather"


def is_attention(node: Node) -> bool:
    return isinstance(node.op, Operator) and node.op.name().partition(".")[0] == ATTENTION


def _has_heads(v: Value, form: Form) -> bool:
    return form.kind == "cut" and form.cut == (AXIS,) and len(v.shape) - form.dim == HEADS


def _along(v: Value) -> Form:
    """Cut along the sequence."""
    return Form("cut", len(v.shape) - SEQUENCE, (AXIS,))
