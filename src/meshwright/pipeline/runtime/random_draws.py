"""Random numbers in the order of one device, for ranks that run forward passes in another order.

One device takes the microbatches one after the other, each from the first chunk to the last. A row with several chunks
or two ways has another order. For such a row, all draws of a step run once before the step, in the order of one device.
The results of these draws are not used. The state of the generator before each forward pass is saved, and restored when
the pass runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from meshwright.graph import Conversion, Node, Program, Run, Value, is_random_call, runner
from meshwright.layout import generator_state

from ..partition.step_parts import PartPlace, RankParts, read_by

Entry = tuple[int, PartPlace, int]
"""Copy of the model, place and microbatch."""
States = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class DrawRehearsal:
    """The draws of the forward passes of a row, in the order of one device."""

    entries: tuple[Entry, ...] = ()
    draws: Mapping[tuple[int, PartPlace], tuple[Run, tuple[Value, ...]]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()

    def states(self, base: Mapping[Value, Any]) -> dict[Entry, States]:
        """Run all draws; return the state of the generators before each entry.

        Afterwards the generators have the state that one device has after the step.
        """
        found: dict[Entry, States] = {}
        for copy, place, m in self.entries:
            found[copy, place, m] = self.now()
            run, reads = self.draws[copy, place]
            run(*(base[v] for v in reads))
        return found

    def now(self) -> States:
        return {device: generator_state(device) for device in self.devices}


def rehearsal(row: Sequence[Entry], copies: Sequence[RankParts], known: Collection[Value]) -> DrawRehearsal:
    """Return the draws to run before a step: none if the row draws in the order of one device by itself.

    Also none if draws read other values than those `known` before the step, such as a probability that is part of the
    batch. Numbers are then drawn in the order of the row.
    """
    programs = {(n, place): _draws(p) for n, parts in enumerate(copies) for place, p in parts.programs.items()}
    entries = [e for e in row if e[1].part == "F" and programs[e[:2]].nodes]
    in_order = sorted(entries, key=lambda entry: (entry[2], entry[1].chunk))
    drawn = {e[:2]: programs[e[:2]] for e in entries}
    if entries == in_order or not all(_can_be_first(p, known) for p in drawn.values()):
        return DrawRehearsal()
    return _rehearsal_of(in_order, drawn)


def _rehearsal_of(entries: Sequence[Entry], draws: Mapping[tuple[int, PartPlace], Program]) -> DrawRehearsal:
    devices = {v.device for p in draws.values() for node in p.nodes if is_random_call(node) for v in node.outs}
    runs = {at: (runner(p), tuple(i.value for i in p.inputs)) for at, p in draws.items()}
    return DrawRehearsal(tuple(entries), runs, tuple(sorted(devices)))


def _draws(program: Program) -> Program:
    """Return the part of the program that consists of its draws and the values that they read."""
    needed: set[Value] = set()
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if is_random_call(node) or not needed.isdisjoint(node.outs):
            needed.update(node.ins)
            kept.append(node)
    nodes = tuple(reversed(kept))
    return replace(program, inputs=read_by(nodes, (), program.inputs, {}), nodes=nodes, outputs=(), writes=())


def _can_be_first(program: Program, known: Collection[Value]) -> bool:
    communicates = any(isinstance(node.op, Conversion) and node.op.communicates for node in program.nodes)
    return not communicates and all(i.value in known for i in program.inputs)
