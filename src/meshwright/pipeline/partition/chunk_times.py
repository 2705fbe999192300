"""Relative run time of a model's chunks, counted from the captured program. The longest forward pass is 1."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from meshwright.graph import ALWAYS, Node, Program, Value, work_of

from ..simulation.simulator import Times
from .stages import Stages

LEAST = 1e-3
ATTENTION_BACKWARD = 2.5
"""Operations of an attention's backward per operation of its forward.

The backward recomputes the forward products, and computes two gradients of each of them.
"""


class NodeOperations(NamedTuple):
    """Operations of a node: its forward pass, the gradients of activations, and the gradients of weights."""

    forward: float
    backward: float
    weight: float


def chunk_times(program: Program, stages: Stages, trained: Collection[str]) -> Times:
    """Return the times of F, B and W of each chunk of a staged program, in units of the longest F.

    `trained` are the parameters that get a gradient. A product of x and w is computed once more for each of its
    gradients: that of x belongs to B, that of w to W. Values without a gradient cost neither: inputs, labels, frozen
    weights.
    """
    totals = _work_of_chunks(program, len(stages.way), trained)
    longest = max((total.forward for total in totals), default=0.0) or 1.0
    forward, backward, weight = (
        tuple(max(flops / longest, LEAST) for flops in column) for column in zip(*totals, strict=True)
    )
    return Times(forward, backward, weight)


def _work_of_chunks(program: Program, chunks: int, trained: Collection[str]) -> list[NodeOperations]:
    once = {i.value for i in program.inputs if i.role in ("parameter", "buffer", "constant")}
    needs = {i.value for i in program.inputs if i.role == "parameter" and i.name in trained}
    totals = [NodeOperations(0.0, 0.0, 0.0)] * chunks
    for node in program.nodes:
        chunk = node.origin.chunk
        if chunk == ALWAYS:
            once.update(node.outs)
        elif chunk is not None and chunk >= 0:
            work = _work(node, once, needs)
            totals[chunk] = NodeOperations(*(a + b for a, b in zip(totals[chunk], work, strict=True)))
        if not needs.isdisjoint(node.ins):
            needs.update(filter(_is_float, node.outs))
    return totals


def _is_float(v: Value) -> bool:
    return isinstance(v.dtype, torch.dtype) and v.dtype.is_floating_point


def _work(node: Node, once: Collection[Value], needs: Collection[Value]) -> NodeOperations:
    flops = work_of(node).flops
    wanted = [v for v in node.ins if v in needs]
    weights = [v for v in wanted if v in once]
    if "attention" in str(node.op):
        return NodeOperations(flops, ATTENTION_BACKWARD * flops if wanted else 0.0, 0.0)
    return NodeOperations(flops, flops * (len(wanted) - len(weights)), flops * sum(1 for v in weights if v.is_tensor))
