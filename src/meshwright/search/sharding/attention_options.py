"""Context parallelism of attention: keys and values are gathered, or heads are sharded instead ("ulysses").

"gather" follows from the rule of attention for sharded queries. "ulysses" is an option of its own: operands and results
are sharded along the sequence, an all-to-all changes this to sharded heads and back, and attention runs under the
option that shards heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.graph import Node, Operator, Value
from meshwright.layout import hint
from meshwright.tensor import Context

from .forms import AXIS, AxisForm
from .operator_options import Forms, Option, Options, tensors_of

ATTENTION = "aten::scaled_dot_product_attention"
SEQUENCE, HEADS = 2, 3
"""Dims of queries, keys, values and results, counted from the last."""
METHOD_SENTENCES: Mapping[Context, str] = {
    "gather": "queries are sharded along the sequence, keys and values gathered",
    "ulysses": "all-to-all shards heads instead of the sequence, and back (ulysses)",
}


def ulysses_options(
    node: Node, options: Sequence[Option], ranks: int, price: Callable[[Value], float]
) -> Iterator[Option]:
    """Yield the option "ulysses" of an attention, if it can shard heads and the sequence divides evenly.

    `price` returns the seconds of the all-to-all of a value, and of its gradient.
    """
    operands, made = tensors_of(node.ins), tensors_of(node.outs)
    given = node.ins[:3]
    if not _has_even_sequence(given, ranks) or len({len(v.shape) for v in (*given, *made)}) != 1:
        return
    for option in options:
        needs = dict(zip(operands, option.needs, strict=True))
        if _shards_only_heads(needs, given):
            along = needs | {v: _sequence_form(v) for v in given}
            seconds = option.seconds + sum(map(price, (*given, *made)))
            yield Option(tuple(along.values()), tuple(map(_sequence_form, made)), seconds)
            return


def _has_even_sequence(given: Sequence[Value], ranks: int) -> bool:
    """True if queries, keys and values have one length, which the ranks divide."""
    lengths = {hint(v.shape[-SEQUENCE]) for v in given if len(v.shape) >= HEADS}
    return len(lengths) == 1 and lengths.pop() % ranks == 0


def _shards_only_heads(needs: Forms, given: Sequence[Value]) -> bool:
    """True if queries, keys and values are sharded in heads, and no other operand is sharded."""
    return all(_shards_heads(v, form) if v in given else form.kind != "cut" for v, form in needs.items())


def count_attention_methods(options: Options) -> Counter[Context]:
    """Count the attentions along a sharded sequence, by context-parallel method."""
    return Counter(_methods_used(options))


def attention_sentences(found: Counter[Context]) -> list[str]:
    """Return the counts as sentences."""
    return [f"context parallel: in {n} attention{'s' * (n > 1)}, {METHOD_SENTENCES[name]}" for name, n in found.items()]


def _methods_used(options: Options) -> Iterator[Context]:
    for node, option in options.items():
        if is_attention(node) and option.needs[0] == _sequence_form(node.ins[0]):
            key = option.needs[tensors_of(node.ins).index(node.ins[1])]
            yield "ulysses" if key.kind == "cut" else "gather"


def is_attention(node: Node) -> bool:
    return isinstance(node.op, Operator) and node.op.name().partition(".")[0] == ATTENTION


def _shards_heads(v: Value, form: AxisForm) -> bool:
    return form.kind == "cut" and form.cut == (AXIS,) and len(v.shape) - form.dim == HEADS


def _sequence_form(v: Value) -> AxisForm:
    """Return the form that is sharded along the sequence."""
    return AxisForm("cut", len(v.shape) - SEQUENCE, (AXIS,))
