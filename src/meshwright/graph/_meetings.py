"""Reductions of kernels' programs, where all ranks wait for each other: late, and many in a row.

Where nothing works on the side, each reduction is a meeting, and what one rank is late to one meeting another may be
late to the next. Between meetings that follow each other directly nobody falls behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.reshard import AllReduce

from ._node import Carry, Node, Value


def meeting_late(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes with each run of all-reduces before the first node that reads one of its results.

    What communicates keeps its order, on every rank the same.
    """
    done: list[Node] = []
    waiting: list[Node] = []
    awaited: set[Value] = set()
    for node in nodes:
        reduces = isinstance(node.op, Carry) and isinstance(node.op.step, AllReduce)
        communicates = isinstance(node.op, Carry) and node.op.communicates
        if any(v in awaited for v in node.ins) or (communicates and not reduces):
            done += waiting
            waiting, awaited = [], set()
        if reduces:
            waiting.append(node)
            awaited.update(node.outs)
        else:
            done.append(node)
    return (*done, *waiting)
