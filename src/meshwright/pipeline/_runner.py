"""One interpreter for all tables: a rank's row is run action by action, on whatever carrier the rank has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Carrier, current
from meshwright.graph import Input, Program, Run, Value, runner, tensor_dtype
from meshwright.reshard import Halves, halves_of

from ._action import Kind
from ._draws import Entry, rehearsal, set_states
from ._errors import StageError
from ._intake import Intake
from ._parts import BEFORE, BEHIND, Crossing, Part, Parts, Place, Total
from ._schedule import Schedule
from ._stages import Stages

_PARTS: Mapping[Kind, tuple[Part, ...]] = {
    Kind.FORWARD: ("F",),
    Kind.RECOMPUTE: ("R",),
    Kind.BACKWARD: ("R", "B", "W"),
    Kind.BACKWARD_INPUT: ("R", "B"),
    Kind.BACKWARD_WEIGHT: ("W",),
}
"""What an action runs. Messages go with the actions that make and read them, so their own actions run nothing."""
_MAY_LACK = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""What runs as fewer programs where a step was not taken apart as far."""

Known = dict[Value, Any]
Make = Callable[[Program], tuple[Run, tuple[Value, ...]]]
"""Gives a program as a function, and the inputs for which that gives values to write; it may write others itself."""


def plainly(program: Program) -> tuple[Run, tuple[Value, ...]]:
    """The program node by node."""
    return runner(program), tuple(x for x, _ in program.writes)


@dataclass(slots=True)
class _Part:
    """A program of a place, what it reads and gives, and what is sent and received around it; `layers` name it."""

    run: Run
    reads: tuple[Value, ...]
    gives: tuple[Value, ...]
    arriving: list[_Message]
    leaving: list[_Message]
    terms: tuple[tuple[Value, Value], ...]
    renewed: tuple[tuple[Value, Value], ...]
    layers: str


@dataclass(frozen=True, slots=True)
class _Message:
    """A crossing as one rank sees it."""

    crossing: Crossing
    halves: Halves | None
    like: Tensor

    def send(self, held: Known, here: Carrier, tag: int) -> None:
        x = held[self.crossing.operand]
        if self.halves is None:
            held[self.crossing.result] = x
            return
        for peer, take in self.halves.outgoing:
            here.send(take(x), peer, tag)
        if self.halves.kept:
            held[self.crossing.result] = [take(x) for take in self.halves.kept]

    def receive(self, held: Known, here: Carrier, tag: int) -> None:
        if self.halves is None:
            return
        like, kept = self.like, held.get(self.crossing.result, [])
        parts = [here.receive(peer, tag, shape, like.dtype, like.device) for peer, shape in self.halves.expected]
        held[self.crossing.result] = self.halves.join([*parts, *kept], like)


class _Totals:
    """Sums over microbatches; the first term is left as it is, since other values may look at its memory."""

    def __init__(self) -> None:
        self.known: Known = {}
        self._own: set[Value] = set()

    def add(self, v: Value, term: Tensor) -> None:
        if v not in self.known:
            self.known[v] = term
        elif v in self._own:
            self.known[v].add_(term)
        else:
            self.known[v] = self.known[v] + term
            self._own.add(v)


class PipelineRun:
    """A training step of all microbatches, in the order of a schedule's row.

    `copies` are the parts of the model's copies, and `intake` tells which one a microbatch goes through. Every copy
    of a way of the schedule is one; microbatches of other sizes have others. `run(*inputs)` takes the inputs of
    `inputs`. It gives the outputs of the program behind, and the values that `writes` take over. After each action
    `watch` is told what is held of each microbatch.
    """

    def __init__(
        self, copies: Sequence[Parts], schedule: Schedule, rank: int, intake: Intake,
        make: Make = plainly, watch: Callable[[Sequence[Known]], None] | None = None,
    ) -> None:  # fmt: skip
        self.inputs = intake.inputs
        self._microbatches, self._feeds, self._watch = schedule.sequences, intake.feeds, watch
        self._before = [(p.programs[BEFORE], p.gives[BEFORE], make(p.programs[BEFORE])[0]) for p in copies]
        behind = copies[0].programs[BEHIND]
        self._behind, written = make(behind)
        self._reads = tuple(i.value if i.role != "saved" else i.source for i in behind.inputs)
        self._parts = {
            (copy, place): _part(place, parts, [_message(c, rank) for c in parts.crossings], make)
            for copy, parts in enumerate(copies)
            for place in parts.programs
            if place not in (BEFORE, BEHIND)
        }
        stage = copies[0].stages.of(rank)
        self._row = () if stage is None else _entries(schedule, stage, intake.copies, self._parts)
        self._ways = tuple(schedule.way_of(m * schedule.slices) for m in range(schedule.sequences))
        once = {v for _, gives, _ in self._before for v in gives}
        fed = {feed.value for feeds in intake.feeds for feed in feeds}
        known = once | {i.value for i in self.inputs} - fed
        self._drops = _drops(self._row, self._parts, known)
        self._rehearsal = rehearsal(self._row, copies, known)
        self._same = _buffers(self.inputs)
        self._renewed = tuple(dict.fromkeys(self._same.get(x, (x,))[0] for parts in copies for x, _ in parts.renewed))
        self.writes = (*self._renewed, *written)

    def __call__(self, *inputs: Any) -> tuple[Any, list[Any]]:
        here, count = current(), self._microbatches
        base: Known = dict(zip((i.value for i in self.inputs), inputs, strict=True))
        with torch.no_grad():
            for program, gives, run in self._before:
                out, _ = run(*(base[i.value] for i in program.inputs))
                base.update(zip(gives, out, strict=True))
            held = self._dealt(base)
            totals = _Totals()
            states = self._rehearsal.states(base) if self._rehearsal else {}
            end = self._rehearsal.now() if self._rehearsal else {}
            for (copy, place, m), gone in zip(self._row, self._drops, strict=True):
                set_states(states.get((copy, place, m), {}))
                part, way = self._parts[copy, place], self._ways[m]
                with here.seen.doing("pipeline", f"{place.part}{m}.{place.chunk} {part.layers}"):
                    self._act(part, base, held[m], totals, here, lambda tag, m=m, way=way: (tag * 2 + way) * count + m)
                for v in gone:
                    held[m].pop(v, None)
                if self._watch is not None:
                    self._watch(held)
            set_states(end)
            with here.seen.doing("pipeline", "behind all microbatches"):
                outputs, written = self._behind(
                    *(totals.known[v.of] if isinstance(v, Total) else base[v] for v in self._reads)
                )
        return outputs, [*(base[x] for x in self._renewed), *written]

    def _dealt(self, base: Known) -> list[Known]:
        """What each microbatch begins with."""
        cut = {feed.given for feeds in self._feeds for feed in feeds if feed.is_piece}
        count = self._microbatches
        pieces = {v: base[v].chunk(count) if base[v].shape[0] else [base[v]] * count for v in cut}
        return [
            {feed.value: pieces[feed.given][m] if feed.is_piece else base[feed.given] for feed in feeds}
            for m, feeds in enumerate(self._feeds)
        ]

    def _act(
        self, part: _Part, base: Known, held: Known, totals: _Totals, here: Carrier, tag: Callable[[int], int]
    ) -> None:
        for message in part.arriving:
            message.receive(held, here, tag(message.crossing.tag))
        if part.gives:
            out, _ = part.run(*[held[v] if v in held else base[v] for v in part.reads])
            held.update(zip(part.gives, out, strict=True))
        for x, v in part.terms:
            totals.add(v, held[x])
        for x, v in part.renewed:
            base.update(dict.fromkeys(self._same.get(x, (x,)), held[v]))
        for message in part.leaving:
            message.send(held, here, tag(message.crossing.tag))


def _buffers(inputs: Sequence[Input]) -> Mapping[Value, tuple[Value, ...]]:
    """What stands for the same buffer in all copies of the model, for each of them."""
    named: dict[str, tuple[Value, ...]] = {}
    for given in inputs:
        if given.role == "buffer":
            named[given.name] = (*named.get(given.name, ()), given.value)
    return {v: same for same in named.values() for v in same}


def _message(crossing: Crossing, rank: int) -> _Message:
    step = crossing.carry.step
    v = crossing.result
    like = torch.empty(0, dtype=tensor_dtype(v), device=v.device)
    return _Message(crossing, halves_of(step, crossing.carry.src, rank), like)  # pyright: ignore[reportArgumentType] - an Exchange


def _part(place: Place, parts: Parts, messages: Sequence[_Message], make: Make) -> _Part:
    program = parts.programs[place]
    gives = parts.gives[place]
    arriving = [m for m in messages if m.crossing.target == place]
    here = {*gives, *(m.crossing.result for m in arriving)}
    return _Part(
        make(program)[0],
        tuple(i.value for i in program.inputs),
        gives,
        arriving,
        [m for m in messages if m.crossing.source == place],
        tuple((x, v) for x, v in parts.terms if x in here),
        tuple((x, v) for x, v in parts.renewed if v in here),
        _layers(parts.programs.get(place._replace(part="F"), program)),
    )


def _layers(program: Program) -> str:
    """The first and the last module of a part of the forward pass."""
    found = [*dict.fromkeys(node.origin.layer for node in program.nodes if node.origin.layer)]
    return " … ".join(dict.fromkeys((found[0], found[-1]))) if found else ""


def _entries(
    schedule: Schedule, stage: int, copies: Sequence[int], there: Collection[tuple[int, Place]]
) -> tuple[Entry, ...]:
    """What a stage runs, in order: copies, places and microbatches. What was recomputed before is not again.

    Slices of a sequence are one microbatch here: each finds what those before it left. A backward pass has an R and a W
    where they are `there`.
    """
    done = schedule.recomputed
    found: list[Entry] = []
    for atom in (atom for action in schedule.rows[stage] for atom in action.atoms):
        m, number = divmod(atom.microbatch, schedule.slices)
        for part in _PARTS.get(atom.kind, ()):
            copy, place = copies[m], Place(part, atom.chunk, number)
            if part == "R" and atom.kind is not Kind.RECOMPUTE and (atom.microbatch, atom.chunk) in done:
                continue
            if atom.kind in _MAY_LACK and part != "B" and (copy, place) not in there:
                continue
            found.append((copy, place, m))
    return tuple(found)


def _drops(
    row: Sequence[Entry], parts: Mapping[tuple[int, Place], _Part], kept: set[Value]
) -> tuple[tuple[Value, ...], ...]:
    """After each entry of the row, the values of its microbatch that nothing needs any more."""
    seen: list[set[Value]] = [set() for _ in range(1 + max((m for *_, m in row), default=0))]
    drops: list[tuple[Value, ...]] = []
    for copy, place, m in reversed(row):
        part = parts[copy, place]
        touched = {*part.reads, *part.gives, *(x.crossing.operand for x in part.leaving)}
        touched |= {x.crossing.result for x in part.arriving}
        drops.append(tuple(touched - seen[m] - kept))
        seen[m] |= touched
    return tuple(reversed(drops))


def check_fits(schedule: Schedule, stages: Stages) -> None:
    """Raises StageError for a table that this model has no chunks for, or that means another training."""
    last = len(stages.ranks) - 1
    ways = (stages.way, tuple(last - s for s in stages.way))
    if schedule.slices > 1 and schedule.recomputed:
        found, why = "R, and slices of sequences", "what is made again would be made again for each slice"
    elif schedule.ways != ways[: len(schedule.ways)]:
        found = f"chunks on stages {' and '.join(map(str, schedule.ways))}"
        why = f"the model's marks put its chunks on stages {stages.way}"
    else:
        return
    write = "a schedule with the model's placement, or marks with the schedule's: docs/concepts/pipeline.md"
    raise StageError(f"schedule {schedule.name!r}", found, why, write)
