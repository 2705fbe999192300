"""Early release of gradients: a parameter is updated as soon as its gradient is available, and the gradient is freed.

Nodes of the update that are connected by tensors move together, as early as their operands allow. They stay after the
last node of the forward and backward pass that reads the updated values, so that new values can be written in place.
Groups with nodes that communicate, draw random numbers or assert do not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

from meshwright.graph import (
    AliasClasses,
    Change,
    Conversion,
    Node,
    Pass,
    Program,
    Value,
    alias_classes,
    is_assertion,
    is_random_operator,
    live_memory,
    refuse_writing,
    register_pass,
)


@register_pass
@dataclass(frozen=True)
class Release(Pass):
    """Run the update of each parameter as soon as its gradient is available."""

    name: ClassVar[str] = "release"

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        groups = [g for g in _groups(program) if not any(map(_may_not_move, g.nodes))]
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


@dataclass(eq=False)
class _Group:
    """Connected nodes of the update; `behind` is the index of the last node that they must follow."""

    nodes: list[Node] = field(default_factory=list[Node])
    behind: int = -1


def _may_not_move(node: Node) -> bool:
    return (
        (isinstance(node.op, Conversion) and node.op.communicates)
        or is_random_operator(node.op)
        or is_assertion(node.op)
    )


def _groups(program: Program) -> list[_Group]:
    """Return the connected groups of update nodes, one per parameter, in program order."""
    group_of: dict[Node, _Group] = {}
    common = _common(program)
    for node in program.nodes:
        if node.origin.phase != "update" or node in common:
            continue
        makers = [program.producers[v] for v in node.ins if v in program.producers]
        found = list(dict.fromkeys(group_of[m] for m in makers if m in group_of))
        mine = found[0] if found else _Group()
        for other in found[1:]:
            mine.nodes += other.nodes
            group_of.update(dict.fromkeys(other.nodes, mine))
        mine.nodes.append(node)
        group_of[node] = mine
    place = {node: at for at, node in enumerate(program.nodes)}
    groups = list(dict.fromkeys(group_of.values()))
    awaited = _LastPredecessor(program)
    for group in groups:
        group.nodes.sort(key=place.__getitem__)
        group.behind = max(map(awaited.by, group.nodes), default=-1)
    return groups


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
    moving = {n for g in groups for n in g.nodes} | common
    due: dict[int, list[_Group]] = {}
    for group in groups:
        due.setdefault(group.behind, []).append(group)
    first = min(due)
    nodes: list[Node] = []
    for at in range(-1, len(program.nodes)):
        if at >= 0 and program.nodes[at] not in moving:
            nodes.append(program.nodes[at])
        if at == first:
            nodes += [n for n in program.nodes if n in common]
        nodes += [n for group in due.get(at, ()) for n in group.nodes]
    return tuple(nodes)
