"""Overlap of communication and computation: collectives start once their operands are available.

They are waited for before the first node that reads their results. The algorithm is list scheduling on two resources.
Operators run one after the other, those on the critical path first. Collectives run one after the other on the link.
Their order must be the same on all ranks. It is the program order, except that a collective may pass others whose
operands are not available, if all ranks have the same program with parts of the same shapes. Times come from `cost`.

An operator may run at most `window` positions early. Several windows are tried. The one chosen is the fastest below the
memory limit, or one that needs less memory and is at most 1 % slower. So parameters are gathered ahead, and gradients
of weights are computed while other gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from meshwright.cost import Cluster, cluster_of
from meshwright.graph import (
    Change,
    Conversion,
    Node,
    Pass,
    Program,
    Start,
    Value,
    Wait,
    live_memory,
    map_values,
    refuse_writing,
    register_pass,
    work_of,
)

from .._fixed_order import has_fixed_order, is_collective
from .._rows import has_equal_shards

WINDOWS = (0, 8, 32, 128, 512)
CLOSE = 1.01
"""Allowed relative duration of a schedule that needs less memory than the fastest one."""


@register_pass
@dataclass(frozen=True)
class OverlapSchedule(Pass):
    """Overlap collectives with operators on `cluster`, with at most `memory` bytes (default: the device's memory)."""

    name: ClassVar[str] = "schedule"
    keeps_sums: ClassVar[bool] = True
    cluster: Cluster = field(default_factory=lambda: cluster_of("H100"))
    memory: float | None = None
    windows: tuple[int, ...] = WINDOWS

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        tasks = _Tasks(program, self.cluster)
        if not tasks.sends:
            return program
        limit = self.cluster.device.memory if self.memory is None else self.memory
        found = [f for window in self.windows if (f := self._schedule_in(tasks, window)).peak <= limit]
        if not found:
            return program
        soon = CLOSE * min(f.seconds for f in found)
        best = min((f for f in found if f.seconds <= soon), key=lambda f: (f.peak, f.window))
        return best.program.with_changes(self._change(tasks, best))

    def _schedule_in(self, tasks: _Tasks, window: int) -> _Found:
        order, seconds = _scheduled(tasks, window)
        program = replace(tasks.program, nodes=tuple(_split(order, tasks.program)))
        return _Found(program, seconds, live_memory(program).peak, window)

    def _change(self, tasks: _Tasks, best: _Found) -> Change:
        alone, compute = sum(tasks.seconds), tasks.compute
        sent = alone - compute
        what = f"{len(tasks.sends)} collectives started earlier, by at most {best.window} nodes"
        exposure = f"{sent:.3g} s of communication, of which {max(0.0, best.seconds - compute):.3g} s are exposed"
        saved = {"seconds": alone - best.seconds, "bytes": live_memory(tasks.program).peak - best.peak}
        return Change(self.name, f"{what}: {exposure}", "", saved)


@dataclass(frozen=True)
class _Found:
    program: Program
    seconds: float
    peak: int
    window: int


@dataclass(frozen=True)
class _Tasks:
    """The nodes of a program as tasks: duration, predecessors, successors, and longest path to the end."""

    program: Program
    cluster: Cluster

    @cached_property
    def seconds(self) -> list[float]:
        """Duration of each task."""
        return [self._seconds(node) for node in self.program.nodes]

    @cached_property
    def sends(self) -> set[int]:
        """Indices of the tasks that are collectives."""
        return {at for at, node in enumerate(self.program.nodes) if is_collective(node)}

    @cached_property
    def before(self) -> list[set[int]]:
        """Predecessors of each task: producers of its operands, and the one before it in a chain of fixed order."""
        nodes = self.program.nodes
        makers = {v: at for at, node in enumerate(nodes) for v in node.outs}
        found = [{makers[v] for v in node.ins if v in makers} for node in nodes]
        fixed = [at for at, node in enumerate(nodes) if has_fixed_order(node) and at not in self.sends]
        for first, second in (*pairwise(fixed), *(() if self.is_equal_on_ranks else pairwise(sorted(self.sends)))):
            found[second].add(first)
        return found

    @cached_property
    def is_equal_on_ranks(self) -> bool:
        """True if all ranks have this program, with parts of the same shapes, so that they choose the same order."""
        program = self.program
        conversions = [node.op for node in program.nodes if isinstance(node.op, Conversion)]
        meshes = {spec.mesh for op in conversions for spec in (op.src, op.dst)}
        given = [program.specs.get(i.value) for i in program.inputs if i.value.is_tensor]
        specs = [*given, *(spec for op in conversions for spec in (op.src, op.dst))]
        return len(meshes) == 1 and all(spec is not None and has_equal_shards(spec.concrete) for spec in specs)

    @cached_property
    def behind(self) -> list[list[int]]:
        """Successors of each task."""
        return _reversed(self.before)

    @cached_property
    def rest(self) -> list[float]:
        """Length of the longest path from the start of each task to the end, in seconds.

        Collectives follow each other in program order on it, since they share the link.
        """
        before = [set(needed) for needed in self.before]
        for first, second in pairwise(sorted(self.sends)):
            before[second].add(first)
        behind, found = _reversed(before), [0.0] * len(before)
        for at in reversed(range(len(found))):
            found[at] = self.seconds[at] + max((found[follower] for follower in behind[at]), default=0.0)
        return found

    @property
    def compute(self) -> float:
        return sum(s for at, s in enumerate(self.seconds) if at not in self.sends)

    def _seconds(self, node: Node) -> float:
        if isinstance(node.op, Conversion):
            return self.cluster.seconds(node.op.step, node.op.src.concrete)
        work = work_of(node)
        return self.cluster.device.seconds(work.flops, work.nbytes, work.dtype) if work.nbytes else 0.0


def _reversed(before: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return the successors of each task, for its predecessors."""
    found: list[list[int]] = [[] for _ in before]
    for at, needed in enumerate(before):
        for other in needed:
            found[other].append(at)
    return found


def _scheduled(tasks: _Tasks, window: int) -> tuple[list[int], float]:
    """Return the order in which tasks start, and the end time of the last one in seconds."""
    run = _Run(tasks, window)
    while run.first < len(tasks.program.nodes):
        run.step()
    return run.order, max(run.now, run.link)


@dataclass
class _Run:
    """Simulation of one rank: `now` is the time of its operators; its link is busy until the time `link`."""

    tasks: _Tasks
    window: int
    now: float = 0.0
    link: float = 0.0
    first: int = 0
    """Index of the first task that has not started."""
    order: list[int] = field(default_factory=list[int])
    ready: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        count = len(self.tasks.program.nodes)
        self.begun = [False] * count
        self.available = [0.0] * count
        """Time at which the results of each task are available."""
        self.missing = [len(needed) for needed in self.tasks.before]
        self.ready = [at for at in range(count) if not self.missing[at]]

    def step(self) -> None:
        """Start an available collective, else the available operator on the longest path; else advance the time."""
        near = [at for at in self.ready if at <= self.first + self.window]
        arrived = [at for at in near if self._arrival(at) <= self.now]
        sends = [at for at in arrived if at in self.tasks.sends]
        if sends:
            self._begin(max(sends, key=self._urgency))
        elif arrived:
            self._begin(max(arrived, key=self._urgency))
        else:
            self.now = min(map(self._arrival, near))

    def _urgency(self, at: int) -> tuple[float, int]:
        return self.tasks.rest[at], -at

    def _arrival(self, at: int) -> float:
        """Return the time at which all operands are available.

        Earlier collectives on the link must only have started before a collective.
        """
        sends = self.tasks.sends
        needed = self.tasks.before[at]
        if at in sends:
            needed = {b for b in needed if b not in sends or self._reads(at, b)}
        return max((self.available[b] for b in needed), default=0.0)

    def _reads(self, at: int, other: int) -> bool:
        nodes = self.tasks.program.nodes
        return any(v in nodes[other].outs for v in nodes[at].ins)

    def _begin(self, at: int) -> None:
        seconds = self.tasks.seconds[at]
        if at in self.tasks.sends:
            self.link = max(self.link, self.now) + seconds
            self.available[at] = self.link
        else:
            self.now += seconds
            self.available[at] = self.now
        self.begun[at] = True
        self.order.append(at)
        self.ready.remove(at)
        for follower in self.tasks.behind[at]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self.ready.append(follower)
        while self.first < len(self.begun) and self.begun[self.first]:
            self.first += 1


def _split(order: Sequence[int], program: Program) -> Iterator[Node]:
    """Yield the nodes in the new order; each collective is a `Start`, and a `Wait` before the first reader."""
    waiting: dict[Value, Node] = {}
    for at in order:
        node = program.nodes[at]
        for v in dict.fromkeys(node.ins):
            if v in waiting:
                yield waiting.pop(v)
        if not (isinstance(node.op, Conversion) and node.op.communicates):
            yield node
            continue
        (x,), (v,) = node.ins, node.outs
        started = Value(f"{v.name}_started", v.shape, v.dtype, v.device)
        yield replace(node, op=Start(node.op), out=started)
        waiting[v] = Node(Wait(node.op), (started, x), {}, map_values(lambda v: v, v), node.origin)
    yield from waiting.values()
