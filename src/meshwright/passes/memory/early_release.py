"""Early release of gradients: a parameter is updated as soon as its gradient is available, and the gradient is freed.

Nodes of the update that are connected by tensors move together, as early as their operands allow. They stay after the
last node of the forward and backward pass that reads the updated values, so that new values can be written in place.
Groups with nodes that communicate, draw random numbers or assert do not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

from meshwright.graph import (
    AliasClasses,
    Change,
    Node,
    Pass,
    Program,
    Value,
    alias_classes,
    live_memory,
    refuse_writing,
    register_pass,
)

from .._fixed_order import has_fixed_order


@register_pass
@dataclass(frozen=True)
class Release(Pass):
    """Run the update of each parameter as soon as its gradient is available."""

    name: ClassVar[str] = "release"
    keeps_sums: ClassVar[bool] = True

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        groups = [g for g in _groups(program) if not any(map(has_fixed_order, g.nodes))]
        moved = _with_early_updates(program, groups) if groups else program.nodes
        if moved == program.nodes:
            return program
        out = replace(program, nodes=moved)
        before, after = (_gradients(p, groups) for p in (program, out))
        what = (
            f"{len(groups)} updates run once their gradient exists: at most {before:,} → {after:,} bytes of gradients"
        )
        return out.with_changes(Change(self.name, what, "", {"bytes": before - after}))


def _gradients(program: Program, groups: Sequence[_Group]) -> int:
    """Return the peak of live bytes of values that forward and backward pass produce for the update."""
    live, found = live_memory(program), alias_classes(program)
    read = {v for g in groups for n in g.nodes for v in n.ins}
    made = {found.of(v) for v in read if v in program.producers and program.producers[v].origin.phase != "update"}
    steps = [0] * (len(program.nodes) + 1)
    for v, (first, last) in live.spans.items():
        if found.of(v) in made:
            steps[first] += v.nbytes
            steps[min(last + 1, len(program.nodes))] -= v.nbytes
    return max(accumulate(steps))


@dataclass(frozen=True)
class _Group:
    """Connected nodes of the update; `behind` is the index of the last node that they must follow."""

    nodes: Sequence[Node]
    behind: int


def _groups(program: Program) -> list[_Group]:
    """Return the connected groups of update nodes, one per parameter, in program order."""
    place = {node: at for at, node in enumerate(program.nodes)}
    awaited = _LastPredecessor(program)
    groups = [sorted(nodes, key=place.__getitem__) for nodes in _connected(program)]
    return [_Group(nodes, max(map(awaited.by, nodes), default=-1)) for nodes in groups]


def _connected(program: Program) -> list[list[Node]]:
    """Return the update nodes in groups that no value connects, except values that many updates read."""
    group_of: dict[Node, list[Node]] = {}
    common = _common(program)
    for node in program.nodes:
        if node.origin.phase != "update" or node in common:
            continue
        makers = [program.producers[v] for v in node.ins if v in program.producers]
        found = _distinct(group_of[maker] for maker in makers if maker in group_of)
        mine = found[0] if found else []
        for other in found[1:]:
            mine += other
            group_of.update(dict.fromkeys(other, mine))
        mine.append(node)
        group_of[node] = mine
    return _distinct(group_of.values())


def _distinct(groups: Iterable[list[Node]]) -> list[list[Node]]:
    """Return each group once, in order."""
    return list({id(group): group for group in groups}.values())


def _common(program: Program) -> set[Node]:
    """Return the update nodes on numbers alone, such as nodes on the learning rate, which many updates read."""
    found: set[Node] = set()
    tensors = {i.value for i in program.inputs if i.value.is_tensor}
    for node in program.nodes:
        made = [program.producers.get(v) for v in node.ins if v not in tensors]
        if node.origin.phase == "update" and not any(v.is_tensor for v in (*node.ins, *node.outs)):
            if all(m is None or m in found for m in made):
                found.add(node)
    return found


@dataclass
class _LastPredecessor:
    """Computation of the last forward or backward node that an update node must follow.

    That node produces an operand of the update node, or reads memory that it updates.
    """

    program: Program
    found: AliasClasses = field(init=False)
    last: dict[Value, int] = field(default_factory=dict[Value, int])

    def __post_init__(self) -> None:
        self.found = alias_classes(self.program)
        self.renewed = {self.found.of(x) for x, _ in self.program.writes}
        self.made = {v: at for at, node in self._passes() for v in node.outs}
        for at, node in self._passes():
            self.last.update(dict.fromkeys(map(self.found.of, node.ins), at))

    def _passes(self) -> Iterator[tuple[int, Node]]:
        return ((at, n) for at, n in enumerate(self.program.nodes) if n.origin.phase != "update")

    def by(self, node: Node) -> int:
        roots = (root for v in node.ins if (root := self.found.of(v)) in self.renewed)
        return max([-1, *(self.made.get(v, -1) for v in node.ins), *(self.last.get(root, -1) for root in roots)])


def _with_early_updates(program: Program, groups: Sequence[_Group]) -> tuple[Node, ...]:
    """Return the nodes with each group directly after the node it must follow; shared nodes come before all groups."""
    common = _common(program)
    due = {min(group.behind for group in groups): [node for node in program.nodes if node in common]}
    for group in groups:
        due.setdefault(group.behind, []).extend(group.nodes)
    moving = {node for nodes in due.values() for node in nodes}
    found = due.get(-1, [])
    for at, node in enumerate(program.nodes):
        if node not in moving:
            found.append(node)
        found += due.get(at, ())
    return tuple(found)
