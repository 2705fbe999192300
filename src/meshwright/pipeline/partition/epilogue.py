"""The program after all microbatches, which all ways of a pipeline share: it reads means over the microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch

from meshwright.graph import Draft, Input, Node, Origin, Program, Value, join_programs, map_values

from .step_parts import EPILOGUE, RankParts


class MicrobatchSum(NamedTuple):
    """Source of an input that is the sum of the value `of` over all microbatches."""

    of: Value


def joint_epilogue(ways: Sequence[RankParts], microbatches: int) -> Program:
    """Return the program after the microbatches of all ways: a loss and gradients that are means over all microbatches.

    The source of an input with the role "saved" is a value of one of the ways, or a `MicrobatchSum`.
    """
    first, *others = (_averaged(parts, microbatches) for parts in ways)
    return reduce(_joined, others, first)


def _averaged(parts: RankParts, microbatches: int) -> Program:
    """Return the program behind, with sums divided by the number of microbatches before they are read."""
    behind = parts.programs[EPILOGUE]
    totals = [_named("sum", v) for v in parts.sums]
    means = {v: _named("mean", v) for v in parts.sums}
    shares = [
        Node(torch.ops.aten.div.Tensor, (total, microbatches), {}, mean, Origin("backward"))
        for total, mean in zip(totals, means.values(), strict=True)
    ]
    kept = (i for i in behind.inputs if i.value not in means)
    given = (Input(t, "saved", t.name, None, MicrobatchSum(v)) for t, v in zip(totals, parts.sums, strict=True))
    nodes = (_reading(node, means) for node in behind.nodes)
    specs = {**behind.specs, **{means[v]: spec for v, spec in behind.specs.items() if v in means}}
    return replace(
        behind,
        inputs=(*kept, *given),
        nodes=(*shares, *nodes),
        specs=specs,
        outputs=map_values(lambda v: means.get(v, v), behind.outputs),
    )


def _named(what: str, v: Value) -> Value:
    return Value(f"{what}_of_{v.name}", v.shape, v.dtype, v.device)


def _reading(node: Node, became: Mapping[Value, Value]) -> Node:
    args, kwargs = map_values(lambda v: became.get(v, v), (node.args, dict(node.kwargs)))
    return replace(node, args=args, kwargs=kwargs)


def _joined(a: Program, b: Program) -> Program:
    """Return both programs as one, with their results added up."""
    both = join_programs(a, b, {}, lambda x, y: (x, y))
    x, y = both.outputs
    draft = Draft(both)

    def add(v: Value, w: Value) -> Value:
        return draft.add(torch.ops.aten.add.Tensor, v, w, before=draft.end, origin=Origin("backward"))

    grads = {name: add(v, y["grads"][name]) if name in y["grads"] else v for name, v in x["grads"].items()}
    grads |= {name: v for name, v in y["grads"].items() if name not in grads}
    out = add(x["out"], y["out"])
    nodes = tuple(Node(s.op, s.args, s.kwargs, s.out, s.origin) for s in draft)
    return replace(both, nodes=nodes, outputs={"out": out, "grads": grads})


def with_epilogue(ways: Sequence[RankParts], behind: Program) -> tuple[RankParts, ...]:
    """Return the parts of all ways with `behind` as the first way's program behind.

    It need not read all of the sums.
    """
    behind = _without_unread(Draft(behind).finish())
    totals = {i.source.of for i in behind.inputs if isinstance(i.source, MicrobatchSum)}
    others = [Program((), (), None)] * (len(ways) - 1)
    return tuple(_ending(parts, last, totals) for parts, last in zip(ways, [behind, *others], strict=True))


def _without_unread(behind: Program) -> Program:
    """Return the program without the saved inputs that it does not read."""
    read = {v for node in behind.nodes for v in node.ins} | set(behind.results)
    return replace(behind, inputs=tuple(i for i in behind.inputs if i.role != "saved" or i.value in read))


def _ending(parts: RankParts, behind: Program, totals: Collection[Value]) -> RankParts:
    """Return the parts with this program behind, and with the terms of the sums `totals` only."""
    return replace(
        parts,
        programs={**parts.programs, EPILOGUE: behind},
        gives={**parts.gives, EPILOGUE: ()},
        terms=tuple((x, v) for x, v in parts.terms if v in totals),
    )
