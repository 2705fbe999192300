"""Account of a program: the price of each communication and phase, and the bytes that are live over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from meshwright.cost import Cluster
from meshwright.graph import (
    Conversion,
    Input,
    LiveMemory,
    Node,
    Program,
    Start,
    Value,
    live_memory,
    map_values,
    name_of,
    type_text,
    work_of,
)
from meshwright.layout import TorchValue
from meshwright.pipeline import Schedule, Timeline, Times, simulate_schedule

from ..plan_data.account import Account, Communication, MemoryCurve, TensorLayout, pipeline_memory_curve
from ..transformer_plans.communication import link_name

POINTS = 600
"""Upper bound on the points of a curve; each is the largest of those that it replaces."""
GRADIENT = "gradients added up"
LOOKED_AT = 64
"""Number of ranks of a group whose received bytes are compared."""


def program_account(
    program: Program, cluster: Cluster, ranks: int, schedule: Schedule | None = None, how: str = ""
) -> Account:
    """Return the account of the program of one rank, with its nodes priced one after the other.

    With a pipeline, the program is that of one microbatch and of the work done once per step, and `schedule` is its
    table.
    """
    return _PricedProgram(close_program(program), cluster, ranks, schedule).account(how)


def close_program(program: Program) -> Program:
    """Return the program with each input once, and with values that no node makes as inputs.

    The program of a pipeline consists of several programs, which repeat inputs. The values that no node makes are sums
    over microbatches.
    """
    first: dict[tuple[str, str], Input] = {}
    stands = {i.value: first.setdefault((i.role, i.name), i).value for i in program.inputs}

    def same(tree: TorchValue) -> TorchValue:
        return map_values(lambda v: stands.get(v, v), tree)

    nodes = tuple(replace(n, args=same(n.args), kwargs=same(dict(n.kwargs))) for n in program.nodes)
    writes = tuple((same(x), same(v)) for x, v in program.writes)
    once = replace(program, inputs=tuple(first.values()), nodes=nodes, outputs=same(program.outputs), writes=writes)
    known = {i.value for i in once.inputs} | set(once.producers)
    read = dict.fromkeys(v for v in (*(v for n in nodes for v in n.ins), *once.results) if v not in known)
    return replace(once, inputs=(*once.inputs, *(Input(v, "gradient", v.name) for v in read)))


@dataclass(frozen=True)
class _PricedProgram:
    program: Program
    cluster: Cluster
    ranks: int
    schedule: Schedule | None

    def account(self, how: str) -> Account:
        memory, spent = live_memory(self.program), self._spent()
        curve = self._curve(memory) if self.timeline is None else self._piped_curve(self.timeline, memory)
        most = max(float(memory.peak), *(held for _, held in curve.points))
        return Account(
            f"a program of {len(self.program.nodes)} operators",
            how or "as marked",
            f"rank {self.program.rank} of {self.ranks}: {self.cluster!r}",
            sum(spent.values()),
            most,
            self.cluster.device.available,
            tuple(self._why(spent, memory)),
            spent,
            {curve.rank: self._held(memory, most)},
            tuple(self._laid()),
            tuple(self._sent()),
            timeline=self.timeline,
            curves=(curve,),
        )

    # --- time

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each node, without overlap."""
        return tuple(map(self._node, self.program.nodes))

    def _node(self, node: Node) -> float:
        carry = _communication_of(node)
        if carry is not None:
            return self.cluster.seconds(carry.step, carry.src.concrete) if carry.communicates else 0.0
        work = work_of(node)
        return self.cluster.device.seconds(work.flops, work.nbytes, work.dtype) if work.nbytes else 0.0

    def _spent(self) -> dict[str, float]:
        """Return the seconds of a step by phase, and of communication; nodes of a chunk count once per microbatch."""
        found = {"forward": 0.0, "backward": 0.0, "update": 0.0, "communication": 0.0}
        for node, seconds in zip(self.program.nodes, self.seconds, strict=True):
            found["communication" if _communication_of(node) else node.origin.phase] += seconds * self._times(node)
        if self.timeline is not None:
            found["waiting for other ranks"] = self.timeline.makespan - self.timeline.busy[self._own_rank]
        return found

    def _times(self, node: Node) -> int:
        return self.schedule.microbatches if self.schedule is not None and node.origin.chunk in self._own else 1

    # --- the pipeline

    @cached_property
    def _own(self) -> tuple[int, ...]:
        """Chunks of which this rank holds parts."""
        found: set[int] = set()
        for node in self.program.nodes:
            chunk = node.origin.chunk
            if chunk is not None and chunk >= 0 and any(map(self._has_part, node.outs)):
                found.add(chunk)
        return tuple(sorted(found))

    def _has_part(self, v: Value) -> bool:
        """True if this rank holds a part of a value."""
        return v in self.program.specs and self.program.rank in self.program.specs[v].mesh

    @cached_property
    def _own_rank(self) -> int:
        """Pipeline rank that has these chunks."""
        assert self.schedule is not None
        return self.schedule.ways[0][self._own[0]] if self._own else 0

    @cached_property
    def timeline(self) -> Timeline | None:
        """Simulated table with the seconds of this rank's chunks; chunks of other ranks take their average."""
        if self.schedule is None:
            return None
        forward, backward = (self._by_chunk(self.schedule, phase) for phase in ("forward", "backward"))
        half = tuple(b / 2 for b in backward)
        return simulate_schedule(self.schedule, Times(forward, half, half))

    def _by_chunk(self, schedule: Schedule, phase: str) -> tuple[float, ...]:
        found = dict.fromkeys(self._own, 0.0)
        for node, seconds in zip(self.program.nodes, self.seconds, strict=True):
            if node.origin.phase == phase and node.origin.chunk in found:
                found[node.origin.chunk] += seconds
        mean = sum(found.values()) / len(found) if found else 1.0
        return tuple(found.get(chunk, mean) for chunk in range(len(schedule.ways[0])))

    # --- memory

    def _curve(self, memory: LiveMemory) -> MemoryCurve:
        """Return the bytes at each node, one after the other."""
        ends = accumulate(self.seconds)
        points = [(0.0, float(memory.held)), *zip(ends, map(float, memory.live), strict=True)]
        each = -(-len(points) // POINTS)
        most = [max(points[at : at + each], key=lambda p: p[1]) for at in range(0, len(points), each)]
        return MemoryCurve(f"rank {self.program.rank}", (*most, points[-1]))

    def _piped_curve(self, timeline: Timeline, memory: LiveMemory) -> MemoryCurve:
        """Return the bytes of the inputs, plus those of each microbatch that is in flight in a chunk by the table."""
        each = [(memory.peak_in("forward", "backward") - memory.held) / max(1, len(self._own))]
        each *= timeline.schedule.chunks
        return pipeline_memory_curve(f"rank {self.program.rank}", timeline, self._own_rank, float(memory.held), each)

    def _held(self, memory: LiveMemory, most: float) -> dict[str, float]:
        """Return the bytes at the peak: inputs by role, and values that are live then."""
        found: dict[str, float] = {}
        for given in self.program.inputs:
            if given.value.is_tensor:
                name = GRADIENT if given.role == "gradient" else given.role
                found[name] = found.get(name, 0.0) + given.value.nbytes
        return {**found, "values at the peak": most - memory.held}

    # --- rows

    def _why(self, spent: Mapping[str, float], memory: LiveMemory) -> Iterator[str]:
        name, whole = max(spent, key=lambda n: spent[n]), sum(spent.values()) or 1.0
        yield f"{name}: {100 * spent[name] / whole:.1f} % of the step; each node is priced by itself, without overlap"
        yield f"memory{' of one microbatch' if self.timeline else ''}: {memory}"
        if self.timeline is not None:
            yield "chunks of other ranks are assumed to last as long as those of this rank, on average"

    def _laid(self) -> Iterator[TensorLayout]:
        for given in self.program.inputs:
            if given.value.is_tensor and given.role in ("parameter", "buffer", "state", "batch"):
                path, own = given.name.split("."), -2 if given.role == "state" else -1
                lies = repr(given.spec) if given.spec else type_text(given.value)
                layer, name = ".".join(path[:own]), ".".join(path[own:])
                yield TensorLayout(layer, name, lies, float(given.value.nbytes), given.role)

    def _sent(self) -> Iterator[Communication]:
        """Yield every communication, in order."""
        for node, seconds in zip(self.program.nodes, self.seconds, strict=True):
            carry = _communication_of(node)
            if carry is None or not carry.communicates:
                continue
            src, rank = carry.src.concrete, self.program.rank
            group = carry.step.group(src, rank) if rank in src.mesh else src.mesh.process_ids
            nodes = {r // self.cluster.per_node for r in group}
            link = link_name(self.cluster, len(nodes), 1)
            where, times = " ".join(filter(None, [node.origin.phase, node.origin.layer])), self._times(node)
            nbytes = float(max(carry.step.received(src, r) for r in group[:LOOKED_AT]))
            yield Communication(
                name_of(carry), repr(src), where, link, times, nbytes, seconds * times, source=node.origin.where
            )


def _communication_of(node: Node) -> Conversion | None:
    """Return the communication that a node carries out or starts, or None; the end of one costs nothing more."""
    if isinstance(node.op, Start):
        return node.op.carry
    return node.op if isinstance(node.op, Conversion) else None
