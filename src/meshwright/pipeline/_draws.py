"""Random numbers in the order of one device, where a rank's row runs forward passes in another one.

One device takes the microbatches one after the other, each from the first chunk to the last. Where a row does not (it
has several chunks, or two ways), all draws of a step are made once before it, in that order and for their sake alone:
the state of the generator in front of each forward pass is kept, and is there again when the pass is run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.graph import Carry, Node, Program, Run, Value, is_drawing, runner

from ._parts import Parts, Place, read_by

Entry = tuple[int, Place, int]
"""Copy of the model, place, microbatch."""
States = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the forward passes of a row draw, in the order of one device."""

    entries: tuple[Entry, ...]
    draws: Mapping[tuple[int, Place], tuple[Run, tuple[Value, ...]]]
    devices: tuple[str, ...]

    def states(self, base: Mapping[Value, Any]) -> dict[Entry, States]:
        """The state in front of each entry; afterwards generators are where one device has them behind the step."""
        found: dict[Entry, States] = {}
        for copy, place, m in self.entries:
            found[copy, place, m] = self.now()
            run, reads = self.draws[copy, place]
            run(*(base[v] for v in reads))
        return found

    def now(self) -> States:
        return {d: torch.cuda.get_rng_state(d) if "cuda" in d else torch.get_rng_state() for d in self.devices}


def set_states(states: States) -> None:
    """Puts generators into these states, by device."""
    for device, state in states.items():
        if "cuda" in device:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


def rehearsal(row: Sequence[Entry], copies: Sequence[Parts], known: Collection[Value]) -> Rehearsal | None:
    """What is drawn before a step; None where the row draws in the order of one device by itself.

    So it is, too, where draws read more than the values that are `known` before the step: such as a probability of the
    batch. They come in the order of the row.
    """
    programs = {(n, place): _draws(p) for n, parts in enumerate(copies) for place, p in parts.programs.items()}
    entries = [e for e in row if e[1].part == "F" and programs[e[:2]].nodes]
    in_order = sorted(entries, key=lambda entry: (entry[2], entry[1].chunk, entry[1].slice))
    drawn = {e[:2]: programs[e[:2]] for e in entries}
    if entries == in_order or not all(_can_be_first(p, known) for p in drawn.values()):
        return None
    devices = {v.device for p in drawn.values() for node in p.nodes if is_drawing(node) for v in node.outs}
    runs = {at: (runner(p), tuple(i.value for i in p.inputs)) for at, p in drawn.items()}
    return Rehearsal(tuple(in_order), runs, tuple(sorted(devices)))


def _draws(program: Program) -> Program:
    """The part of the program that its draws are, with what they read."""
    needed: set[Value] = set()
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if is_drawing(node) or any(v in needed for v in node.outs):
            needed.update(node.ins)
            kept.append(node)
    nodes = tuple(reversed(kept))
    return replace(program, inputs=read_by(nodes, (), program.inputs, {}), nodes=nodes, outputs=(), writes=())


def _can_be_first(program: Program, known: Collection[Value]) -> bool:
    speaks = any(isinstance(node.op, Carry) and node.op.communicates for node in program.nodes)
    return not speaks and all(i.value in known for i in program.inputs)
