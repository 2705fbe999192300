"""Operators that a sequence can be sliced along though their rules do not shard it.

They are causal attention, means, losses and the selection of positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from meshwright.graph import Node, Operator, Program, Value, tensor_dtype

from .sequence_slicer import NodeCut, SequenceCut, Slicer, SliceRule, Terms, ValueSlices, sliced

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
CLASSES = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d")
ELEMENTS = (
    *("aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::soft_margin_loss"),
    *("aten::kl_div", "aten::poisson_nll_loss", "aten::hinge_embedding_loss", "aten::margin_ranking_loss"),
    *("aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits"),
)


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator by name, including defaults."""
    assert isinstance(node.op, Operator)
    found = {a.name: a.default_value for a in node.op._schema.arguments}
    return found | dict(zip(found, node.args, strict=False)) | dict(node.kwargs)


def attention(s: Slicer, node: Node) -> bool:
    """Cut causal attention: the queries of a slice attend to the keys of this slice and all earlier ones."""
    given = _arguments(node)
    at = len(given["query"].shape) - 2
    q, k, v = (_pieces_along(s, given[name], at) for name in ("query", "key", "value"))
    if q is None or k is None or v is None:
        return False
    why = _not_causal(given, q, k, v)
    if why:
        raise s.refusal(why)
    options = {name: given[name] for name in ("scale", "enable_gqa")}
    made: list[Value] = []
    for n, (query, length, start) in enumerate(zip(q.values, q.cut.lengths, q.cut.starts, strict=True)):
        keys, values = _first_slices(s, k, n), _first_slices(s, v, n)
        mask = _causal_mask(s, n, query, length, start) if n else None
        made.append(s.add(n, node.op, query, keys, values, mask, 0.0, n == 0, **options))
    s.held[node.outs[0]] = ValueSlices(q.cut, tuple(made))
    return True


def _not_causal(given: Mapping[str, Any], q: ValueSlices, k: ValueSlices, v: ValueSlices) -> str:
    if given["attn_mask"] is not None:
        return "its mask may not hide later positions"
    if not given["is_causal"]:
        return "each position attends to later ones"
    if given["dropout_p"]:
        return "its dropout draws for the whole sequence"
    return "queries and keys are split at different positions" if not q.cut == k.cut == v.cut else ""


def _first_slices(s: Slicer, x: ValueSlices, n: int) -> Value:
    """Return the slices up to slice n as one value."""
    return s.add(n, aten.cat.default, list(x.values[: n + 1]), x.cut.dim) if n else x.values[0]


def _causal_mask(s: Slicer, n: int, query: Value, length: int, start: int) -> Value:
    every = s.add(n, aten.ones.default, [length, start + length], dtype=torch.bool, device=torch.device(query.device))
    return s.add(n, aten.tril.default, every, start)


def class_loss(s: Slicer, node: Node) -> bool:
    """Cut a loss over classes into a sum per slice.

    A mean divides by the weights of all targets that are not ignored.
    """
    given = _arguments(node)
    if given["reduction"] == NONE:
        return False
    cut = s.cut_of(node)
    x, target = given["self"], given["target"]
    classes = min(len(x.shape) - 1, 1)
    if cut.factor in cut.bound.ins[0][classes]:
        return False
    _sum(s, cut)
    if given["reduction"] == MEAN and tensor_dtype(target).is_floating_point:
        _divide(s, node, prod(n for d, n in enumerate(x.shape) if d != classes))
    elif given["reduction"] == MEAN:
        targets = s.local(cut, known=True)[target]
        weight = s.whole(given["weight"]) if given["weight"] else None
        counts = (_target_weight(s, n, each, weight, given["ignore_index"]) for n, each in enumerate(targets))
        _divide(s, node, Terms(tuple(counts)))
    return True


def _target_weight(s: Slicer, n: int, target: Value, weight: Value | None, ignored: int) -> Value:
    """Return the total weight of the targets of a slice."""
    counted = s.add(n, aten.ne.Scalar, target, ignored)
    if weight is None:
        return s.add(n, aten.sum.default, counted)
    rows = s.add(n, aten.reshape.default, s.add(n, aten.mul.Tensor, target, counted), [-1])
    each = s.add(n, aten.index_select.default, weight, 0, rows)
    return s.add(n, aten.sum.default, s.add(n, aten.mul.Tensor, each, s.add(n, aten.reshape.default, counted, [-1])))


def element_loss(s: Slicer, node: Node) -> bool:
    """Cut an elementwise loss into a sum per slice. A mean divides by the number of all elements."""
    given = _arguments(node)
    if given["reduction"] == NONE:
        return False
    _sum(s, s.cut_of(node))
    if given["reduction"] == MEAN:
        shapes = [x.shape for x in given.values() if isinstance(x, Value)]
        _divide(s, node, prod(torch.broadcast_shapes(*shapes)))
    return True


def _sum(s: Slicer, cut: NodeCut) -> None:
    """Store the result of a loss as one term per slice."""
    node = cut.node
    local = s.local(cut, known=True)
    given = {**_arguments(node), "reduction": SUM}
    terms: list[Value] = []
    for n in range(len(cut.lengths)):
        args = [local[x][n] if isinstance(x, Value) else x for x in given.values()]
        terms.append(s.add(n, node.op, *args))
    s.held[node.outs[0]] = Terms(tuple(terms))


def _divide(s: Slicer, node: Node, by: int | Terms) -> None:
    """Turn the result of a node, terms of a sum so far, into a mean."""
    (out,) = node.outs
    last = len(s.lengths) - 1
    total = s.whole(out)
    s.held[out] = s.add(last, aten.div.Tensor, total, by if isinstance(by, int) else s.joined(by))


def mean(s: Slicer, node: Node) -> bool:
    """Cut a mean over the sequence into a sum per slice, divided by the number of all elements."""
    cut = s.cut_of(node)
    if any(cut.factor in factors for factors in cut.bound.outs[0]):
        return False
    given = _arguments(node)
    x, (out,) = given["self"], node.outs
    local = s.local(cut, known=True)[x]
    listed = given.get("dim") or list(range(len(x.shape)))
    keepdim = given.get("keepdim", False)
    terms = (s.add(n, aten.sum.dim_IntList, v, listed, keepdim, dtype=given["dtype"]) for n, v in enumerate(local))
    s.held[out] = Terms(tuple(terms))
    _divide(s, node, prod(x.shape[d] for d in listed))
    return True


def reshaped(s: Slicer, node: Node) -> bool:
    """Reshape each slice to the shape of its slice of the result."""
    cut = s.cut_of(node)
    local = s.local(cut, known=True)[node.ins[0]]
    s.as_pieces(cut, [s.add(n, aten.reshape.default, v, s.out_shape(cut, n)) for n, v in enumerate(local)])
    return True


def _pieces_along(s: Slicer, v: Value, dim: int) -> ValueSlices | None:
    """Return the slices of a value that is cut along `dim` only; None for any other value."""
    x = s.held[v]
    if not isinstance(x, ValueSlices) or x.cut.before * x.cut.after != 1 or x.cut.dim != dim:
        return None
    return x


def select(s: Slicer, node: Node) -> bool:
    """Select one position from the slice that contains it."""
    given = _arguments(node)
    x = _pieces_along(s, node.ins[0], given["dim"] % len(node.ins[0].shape))
    if x is None:
        return False
    at = given["index"] % x.cut.total
    n = max(n for n, start in enumerate(x.cut.starts) if start <= at)
    s.held[node.outs[0]] = s.add(n, node.op, x.values[n], x.cut.dim, at - x.cut.starts[n])
    return True


def select_range(s: Slicer, node: Node) -> bool:
    """Select consecutive positions: each slice keeps its part of them."""
    given = _arguments(node)
    x = _pieces_along(s, node.ins[0], given["dim"] % len(node.ins[0].shape))
    if x is None:
        return False
    wanted = range(x.cut.total)[_range(given)]
    edges = [*x.cut.starts, x.cut.total]
    kept = [range(max(a, wanted.start), min(b, wanted.stop)) for a, b in pairwise(edges)]
    if wanted.step != 1 or not all(kept):
        raise s.refusal("a slice would keep no positions")
    made = [
        s.add(n, aten.slice.Tensor, v, x.cut.dim, own.start - start, own.stop - start)
        for n, (v, own, start) in enumerate(zip(x.values, kept, x.cut.starts, strict=True))
    ]
    s.held[node.outs[0]] = ValueSlices(SequenceCut(x.cut.dim, 1, 1, tuple(map(len, kept))), tuple(made))
    return True


def _range(given: Mapping[str, Any]) -> slice:
    if "length" in given:
        return slice(given["start"], given["start"] + given["length"])
    return slice(given["start"], given["end"], given["step"])


def dropout(s: Slicer, node: Node) -> bool:
    """Draw one mask for the whole sequence with the first slice; each slice uses its part of the mask."""
    given = _arguments(node)
    x = s.held[given["input"]]
    if not isinstance(x, ValueSlices) or x.cut.before != 1:
        raise s.refusal("its rows and positions are merged into one dim, or it applies to terms of a sum")
    if not given["train"] or given["p"] == 0:
        s.held[node.outs[0]] = x
        return True
    ones = s.add(0, aten.new_ones.default, x.values[0], list(given["input"].shape))
    mask = s.add(0, node.op, ones, given["p"], True)
    made: list[Value] = []
    for n, (v, start, length) in enumerate(zip(x.values, x.cut.starts, x.cut.lengths, strict=True)):
        own = s.add(n, aten.narrow.default, mask, x.cut.dim, start * x.cut.after, length * x.cut.after)
        made.append(s.add(n, aten.mul.Tensor, v, own))
    s.held[node.outs[0]] = ValueSlices(x.cut, tuple(made))
    return True


def broadcast(s: Slicer, node: Node) -> bool:
    """Broadcast tensors: sliced tensors keep their shape, whole tensors are expanded if needed."""
    xs, outs = list(node.ins), list(node.outs)
    pairs = [(x, s.held[x], out) for x, out in zip(xs, outs, strict=True)]
    if any(isinstance(held, ValueSlices) and x.shape != out.shape for x, held, out in pairs):
        return False
    for x, held, out in pairs:
        same = isinstance(held, ValueSlices) or x.shape == out.shape
        s.held[out] = held if same else s.add(s.slice_of(x), aten.expand.default, s.whole(x), list(out.shape))
    return True


def new_tensor(s: Slicer, node: Node) -> bool:
    """Create a tensor of explicit sizes, which reads only the dtype of its operand."""
    x = s.held[node.ins[0]]
    assert isinstance(x, ValueSlices)
    s.held[node.outs[0]] = s.add(0, node.op, x.values[0], *node.args[1:], **node.kwargs)
    return True


SLICE_RULES: Mapping[str, SliceRule] = {
    "aten::scaled_dot_product_attention": attention,
    **dict.fromkeys(CLASSES, class_loss),
    **dict.fromkeys(ELEMENTS, element_loss),
    "aten::mean": mean,
    **dict.fromkeys(("aten::unflatten", "aten::squeeze"), reshaped),
    "aten::select": select,
    **dict.fromkeys(("aten::slice", "aten::narrow"), select_range),
    "aten::dropout": dropout,
    "aten::broadcast_tensors": broadcast,
    **dict.fromkeys(("aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty"), new_tensor),
}


def slice_sequence(program: Program, lengths: Sequence[int]) -> Program:
    """Return the captured program with its sequence, dim 1 of the batch, in slices of these lengths.

    The origin of each node names its slice.

    Raises:
        StageError: an operator needs a later slice, or the batch has no such dim.
    """
    return sliced(program, lengths, SLICE_RULES)
