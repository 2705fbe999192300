"""Grouping of the all-reduces in a program for kernels: as late as possible, and many in a row.

Without overlap, all ranks wait for each other at each all-reduce, and a different rank may be late each time. Between
all-reduces that follow each other directly, no rank falls behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.reshard import AllReduce

from ..program.node import Conversion, Node, Value


def group_all_reduces(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes with the pending all-reduces directly before the first node that reads one of their results.

    Communicating nodes keep their order, which is the same on every rank.
    """
    done: list[Node] = []
    waiting: list[Node] = []
    awaited: set[Value] = set()
    for node in nodes:
        reduces = isinstance(node.op, Conversion) and isinstance(node.op.step, AllReduce)
        communicates = isinstance(node.op, Conversion) and node.op.communicates
        if any(v in awaited for v in node.ins) or (communicates and not reduces):
            done += waiting
            waiting, awaited = [], set()
        if reduces:
            waiting.append(node)
            awaited.update(node.outs)
        else:
            done.append(node)
    return (*done, *waiting)
