"""Repeated concatenation of keys and values for a sliced backward pass, which saves the slices only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from meshwright.graph import Node, Program, Value, map_values


def repeat_concatenations(step: Program) -> Program:
    """Return the recorded step with the concatenations that the backward pass reads repeated in the backward pass.

    Only concatenations of the forward pass whose operands come from more than one slice are repeated. The backward pass
    then saves the slices, not the joined value.
    """
    joins = _joins_of_slices(step)
    again: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in step.nodes:
        if node.origin.phase == "forward" or joins.keys().isdisjoint(node.ins):
            nodes.append(node)
            continue
        for v in dict.fromkeys(node.ins):
            if v in joins and v not in again:
                again[v] = Value(f"{v.name}_again", v.shape, v.dtype, v.device)
                nodes.append(replace(joins[v], out=again[v], origin=replace(joins[v].origin, phase="backward")))
        args, kwargs = map_values(lambda v: again.get(v, v), (node.args, dict(node.kwargs)))
        nodes.append(replace(node, args=args, kwargs=kwargs))
    return replace(step, nodes=tuple(nodes))


def _joins_of_slices(step: Program) -> Mapping[Value, Node]:
    """Map each concatenation of values of several slices in the forward pass to its node."""
    slice_of = {v: node.origin.slice for node in step.nodes for v in node.outs}
    joins: dict[Value, Node] = {}
    for node in step.nodes:
        in_chunk = node.origin.phase == "forward" and (node.origin.chunk or 0) >= 0
        if in_chunk and node.op == torch.ops.aten.cat.default and len({slice_of.get(v) for v in node.ins}) > 1:
            joins[node.outs[0]] = node
    return joins
