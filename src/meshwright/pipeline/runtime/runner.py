"""Interpreter of all tables: runs a rank's row action by action, on the rank's communicator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Communicator, current_communicator
from meshwright.fixed_order import MicrobatchTree, in_same_numbers
from meshwright.graph import GradientInspector, Input, Program, Run, Value, tensor_dtype
from meshwright.layout import TorchValue, set_generator_states
from meshwright.reshard import Halves, halves_of

from .._errors import StageError
from ..partition.microbatch_inputs import MicrobatchInputs
from ..partition.stages import Stages
from ..partition.step_parts import EPILOGUE, PROLOGUE, Crossing, PartKind, PartPlace, RankParts
from ..table.action import ActionKind
from ..table.schedule import Schedule
from ..table.weight_versions import is_asynchronous, updates, versions_used
from .random_draws import Entry, rehearsal
from .weight_stash import Known, WeightStash
from .weight_updates import ProgramMaker, StepUpdates, interpreter, mean_of

_PARTS: Mapping[ActionKind, tuple[PartKind, ...]] = {
    ActionKind.FORWARD: ("F",),
    ActionKind.RECOMPUTE: ("R",),
    ActionKind.BACKWARD: ("R", "B", "W"),
    ActionKind.BACKWARD_INPUT: ("R", "B"),
    ActionKind.BACKWARD_WEIGHT: ("W",),
}
"""Parts that run for each kind of action.

Messages are sent and received with the actions that make and read them, so message actions run nothing.
"""
_MAY_LACK = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})
"""Kinds that run fewer programs if the step was split into fewer parts."""


@dataclass(slots=True)
class _Part:
    """A program of a place, its inputs and outputs, and the messages before and after it; `layers` is its name."""

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
    """A crossing from the view of one rank."""

    crossing: Crossing
    halves: Halves | None
    like: Tensor

    def send(self, known: Mapping[Value, Any], held: Known, here: Communicator, tag: int) -> None:
        operand = self.crossing.operand
        x = held[operand] if operand in held else known[operand]  # a buffer that microbatches update is known
        if self.halves is None:
            held[self.crossing.result] = x
            return
        for peer, take in self.halves.outgoing:
            here.send(take(x), peer, tag)
        if self.halves.kept:
            held[self.crossing.result] = [take(x) for take in self.halves.kept]

    def receive(self, held: Known, here: Communicator, tag: int) -> None:
        if self.halves is None:
            return
        like, kept = self.like, held.get(self.crossing.result, [])
        parts = [here.receive(peer, tag, shape, like.dtype, like.device) for peer, shape in self.halves.expected]
        held[self.crossing.result] = self.halves.join([*parts, *kept], like)


class _Totals:
    """Sums over microbatches. The first term is never written to, since other values may share its memory."""

    def __init__(self) -> None:
        self.known: Known = {}
        self._own: set[Value] = set()

    def sums(self) -> Known:
        """Return the sums of all terms."""
        return self.known

    def add(self, v: Value, term: Tensor, source: Value, microbatch: int) -> None:
        """Add a term of the sum `v`: the value `source` of a microbatch."""
        if v not in self.known:
            self.known[v] = term
        elif v in self._own:
            self.known[v].add_(term)
        else:
            self.known[v] = self.known[v] + term
            self._own.add(v)


class _TreeTotals(_Totals):
    """Sums over microbatches as trees, which do not depend on the order of the schedule."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._trees: dict[Value, dict[Value, MicrobatchTree]] = {}

    def add(self, v: Value, term: Tensor, source: Value, microbatch: int) -> None:
        trees = self._trees.setdefault(v, {})
        trees.setdefault(source, MicrobatchTree(self._count)).add(microbatch, term)

    def sums(self) -> Known:
        """Return the sums; those of several sources are added up in the order of the step."""
        found: Known = {}
        for v, trees in self._trees.items():
            terms = [x for tree in trees.values() if (x := tree.total()) is not None]
            found[v] = reduce(add, terms)
        return found


class PipelineRun:
    """A training step of all microbatches, in the order of a schedule's row.

    `copies` are the parts of the model's copies, and `intake` gives the copy for each microbatch. Each way of the
    schedule has a copy; microbatches of other sizes have their own copies. `run(*inputs)` takes the values of `inputs`.
    It returns the outputs of the program behind, and the new values of `writes`. After each action `watch` gets the
    values held for each microbatch.

    An asynchronous schedule runs the program behind once per update, which writes to its inputs in place. With `again`,
    all updates but the first run that program (`StepUpdates`). With `looks`, `looking` can be called.
    """

    def __init__(
        self,
        copies: Sequence[RankParts],
        schedule: Schedule,
        rank: int,
        intake: MicrobatchInputs,
        make: ProgramMaker = interpreter,
        watch: Callable[[Sequence[Known]], None] | None = None,
        again: Program | None = None,
        looks: bool = False,
    ) -> None:
        self._epilogue = StepUpdates(copies[0].programs[EPILOGUE], again, updates(schedule), make, looks)
        self.looks = self._epilogue.looks
        """True if gradients can be looked at before the update."""
        self.inputs = (*intake.inputs, *self._epilogue.inputs)
        self._microbatches, self._feeds, self._watch = schedule.microbatches, intake.feeds, watch
        self._prologues = [(p.programs[PROLOGUE], p.gives[PROLOGUE], make(p.programs[PROLOGUE])[0]) for p in copies]
        self._parts = _parts_of_actions(copies, rank, make)
        stage = copies[0].stages.of(rank)
        steps = _steps(schedule, stage, intake.copies, self._parts)
        self._row, self._used = tuple(entry for entry, _ in steps), [version for _, version in steps]
        self._ways = tuple(map(schedule.way_of, range(schedule.microbatches)))
        known = _known_before(copies, self.inputs, intake)
        self._before = _read_before_renewal(copies, self._parts)
        self._drops = _drops(self._row, self._parts, known.difference(*self._before))
        self._rehearsal = rehearsal(self._row, copies, known)
        self._same = _changing_inputs(self.inputs, {x for parts in copies for x, _ in parts.renewed})
        self._renewed = tuple(dict.fromkeys(self._same.get(x, (x,))[0] for parts in copies for x, _ in parts.renewed))
        self.writes = (*self._renewed, *self._epilogue.writes)
        self._read = {v for part in self._parts.values() for v in part.reads} & known - self._same.keys()

    def __call__(self, *inputs: TorchValue) -> tuple[Any, list[Any]]:
        outputs, written = self._run(inputs, None)
        return outputs, written or []

    def looking(self, inputs: Sequence[Any], look_at: GradientInspector) -> tuple[Any, list[Any] | None]:
        """Return outputs and values to write as a call does; None for these if `look_at` leaves the update out."""
        return self._run(inputs, look_at)

    def _run(self, inputs: Sequence[Any], look_at: GradientInspector | None) -> tuple[Any, list[Any] | None]:
        here, count = current_communicator(), self._microbatches
        base: Known = dict(zip((i.value for i in self.inputs), inputs, strict=True))
        with torch.no_grad():
            self._begin(base)
            versions = WeightStash(self._used, self._read)
            step = _Step(base, self._inputs_of_microbatches(base), versions, self._new_totals())
            states = self._rehearsal.states(base)
            end = self._rehearsal.now()
            for n, ((copy, place, m), gone) in enumerate(zip(self._row, self._drops, strict=True)):
                if place == EPILOGUE:
                    set_generator_states(end)
                    self._update(n, step, here, look_at)
                    continue
                set_generator_states(states.get((copy, place, m), {}))
                part, way, held = self._parts[copy, place], self._ways[m], step.held[m]
                with here.seen.doing("pipeline", f"{place.part}{m}.{place.chunk} {part.layers}"):
                    known = step.versions.values_for(n, base)
                    for x in self._before[copy]:
                        held.setdefault(x, base[x])
                    _act(part, known, held, step.totals, m, here, lambda tag, m=m, way=way: (tag * 2 + way) * count + m)
                for x, v in part.renewed:
                    base.update(dict.fromkeys(self._same.get(x, (x,)), held[v]))
                for v in gone:
                    held.pop(v, None)
                step.versions.drop(n)
                if self._watch is not None:
                    self._watch(step.held)
        written = None if step.written is None else [*(base[x] for x in self._renewed), *step.written]
        return mean_of(step.outputs), written

    def _begin(self, base: Known) -> None:
        """Run the programs before the microbatches, once for each version of the weights."""
        for program, gives, run in self._prologues:
            out, _ = run(*(base[i.value] for i in program.inputs))
            base.update(zip(gives, out, strict=True))

    def _update(self, n: int, step: _Step, here: Communicator, look_at: GradientInspector | None) -> None:
        """Run the update that is entry n; microbatches in flight keep the weights that they have used."""
        base, at = step.base, len(step.outputs)
        step.versions.keep(n, base, self._epilogue.over(at, base), *step.held)
        with here.seen.doing("pipeline", "after all microbatches"):
            outputs, step.written = self._epilogue(at, base, step.totals.sums(), look_at)
        step.outputs.append(outputs)
        step.totals = self._new_totals()
        if n + 1 < len(self._row):
            self._begin(base)

    def _new_totals(self) -> _Totals:
        return _TreeTotals(self._microbatches) if in_same_numbers() else _Totals()

    def _inputs_of_microbatches(self, base: Known) -> list[Known]:
        """Return the input values of each microbatch."""
        cut = {feed.given for feeds in self._feeds for feed in feeds if feed.is_piece}
        count = self._microbatches
        pieces = {v: base[v].chunk(count) if base[v].shape[0] else [base[v]] * count for v in cut}
        return [
            {feed.value: pieces[feed.given][m] if feed.is_piece else base[feed.given] for feed in feeds}
            for m, feeds in enumerate(self._feeds)
        ]


@dataclass(slots=True)
class _Step:
    """State of a running step: known values, the values held for each microbatch, and the results of updates."""

    base: Known
    held: list[Known]
    versions: WeightStash
    totals: _Totals
    outputs: list[Any] = field(default_factory=list[Any])
    written: list[Any] | None = field(default_factory=list[Any])


def _parts_of_actions(
    copies: Sequence[RankParts], rank: int, make: ProgramMaker
) -> Mapping[tuple[int, PartPlace], _Part]:
    """Return the parts that run in actions, by the copy of the model and the place."""
    found: dict[tuple[int, PartPlace], _Part] = {}
    for copy, parts in enumerate(copies):
        messages = [_message(c, rank) for c in parts.crossings]
        for place in parts.programs:
            if place not in (PROLOGUE, EPILOGUE):
                found[copy, place] = _part(place, parts, messages, make)
    return found


def _read_before_renewal(copies: Sequence[RankParts], parts: Mapping[tuple[int, PartPlace], _Part]) -> list[set[Value]]:
    """Return, for each copy, the tensors that a microbatch renews, and that its later parts read as they were before.

    Later microbatches renew them too before that.
    """
    found: list[set[Value]] = [{x for x, _ in copy.renewed} for copy in copies]
    for at, renewed in enumerate(found):
        renewed &= {v for (copy, place), part in parts.items() if copy == at and place.part != "F" for v in part.reads}
    return found


def _known_before(copies: Sequence[RankParts], inputs: Sequence[Input], intake: MicrobatchInputs) -> set[Value]:
    """Return the values that are known before the microbatches: results of the programs before them, and inputs."""
    once = {v for parts in copies for v in parts.gives[PROLOGUE]}
    fed = {feed.value for feeds in intake.feeds for feed in feeds}
    return once | {i.value for i in inputs} - fed


def _act(
    part: _Part,
    known: Mapping[Value, Any],
    held: Known,
    totals: _Totals,
    microbatch: int,
    here: Communicator,
    tag: Callable[[int], int],
) -> None:
    for message in part.arriving:
        message.receive(held, here, tag(message.crossing.tag))
    if part.gives:
        out, _ = part.run(*[held[v] if v in held else known[v] for v in part.reads])
        held.update(zip(part.gives, out, strict=True))
    for x, v in part.terms:
        totals.add(v, held[x], x, microbatch)
    for message in part.leaving:
        message.send(known, held, here, tag(message.crossing.tag))


def _changing_inputs(inputs: Sequence[Input], renewed: Collection[Value]) -> Mapping[Value, tuple[Value, ...]]:
    """Map each input for a buffer, or for a parameter in `renewed`, to all inputs for the same tensor.

    Each copy of the model has its own, and so has the update.
    """
    parameters = {given.name for given in inputs if given.value in renewed}
    named: dict[str, tuple[Value, ...]] = {}
    for given in inputs:
        if given.role == "buffer" or (given.role == "parameter" and given.name in parameters):
            named[given.name] = (*named.get(given.name, ()), given.value)
    return {v: same for same in named.values() for v in same}


def _message(crossing: Crossing, rank: int) -> _Message:
    step = crossing.carry.step
    v = crossing.result
    like = torch.empty(0, dtype=tensor_dtype(v), device=v.device)
    return _Message(crossing, halves_of(step, crossing.carry.src, rank), like)  # pyright: ignore[reportArgumentType] - an Exchange


def _part(place: PartPlace, parts: RankParts, messages: Sequence[_Message], make: ProgramMaker) -> _Part:
    program = parts.programs[place]
    gives = parts.gives[place]
    arriving = [m for m in messages if m.crossing.target == place]
    here = {*gives, *_arriving_values(arriving)}
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


def _arriving_values(arriving: Sequence[_Message]) -> Iterator[Value]:
    return (message.crossing.result for message in arriving)


def _layers(program: Program) -> str:
    """Return the names of the first and the last module of a part of the forward pass."""
    found = [*dict.fromkeys(node.origin.layer for node in program.nodes if node.origin.layer)]
    return " … ".join(dict.fromkeys((found[0], found[-1]))) if found else ""


def _steps(
    schedule: Schedule, stage: int | None, copies: Sequence[int], there: Collection[tuple[int, PartPlace]]
) -> list[tuple[Entry, int]]:
    """Return the entries of a rank in order, with the version of the weights of each; a rank in no stage only updates.

    An asynchronous schedule gives the place of the updates; otherwise one update comes last.
    """
    row = [] if stage is None else list(_entries(schedule, stage, copies, there))
    if row and is_asynchronous(schedule):
        return row
    last = [((0, EPILOGUE, 0), n + 1) for n in range(updates(schedule))]
    return [*(step for step in row if step[0][1] != EPILOGUE), *last]


def _entries(
    schedule: Schedule, stage: int, copies: Sequence[int], there: Collection[tuple[int, PartPlace]]
) -> Iterator[tuple[Entry, int]]:
    """Yield the entries of a row: copy, place and microbatch, with the version of the weights.

    A chunk that was recomputed by an R action is not recomputed again. A backward pass has an R and a W if they are in
    `there`.
    """
    done = schedule.recomputed
    for atom, version in versions_used(schedule, schedule.rows[stage]):
        if atom.kind is ActionKind.OPTIMIZER:
            yield (0, EPILOGUE, 0), version
            continue
        m = atom.microbatch
        for part in _PARTS.get(atom.kind, ()):
            copy, place = copies[m], PartPlace(part, atom.chunk)
            if part == "R" and atom.kind is not ActionKind.RECOMPUTE and (m, atom.chunk) in done:
                continue
            if atom.kind in _MAY_LACK and part != "B" and (copy, place) not in there:
                continue
            yield (copy, place, m), version


def _drops(
    row: Sequence[Entry], parts: Mapping[tuple[int, PartPlace], _Part], kept: set[Value]
) -> tuple[tuple[Value, ...], ...]:
    """Return, for each entry of the row, the values of its microbatch that no later entry reads."""
    seen: list[set[Value]] = [set() for _ in range(1 + max((m for *_, m in row), default=0))]
    drops: list[tuple[Value, ...]] = []
    for copy, place, m in reversed(row):
        if place == EPILOGUE:
            drops.append(())
            continue
        part = parts[copy, place]
        touched = {*part.reads, *part.gives, *(message.crossing.operand for message in part.leaving)}
        touched.update(_arriving_values(part.arriving))
        drops.append(tuple(touched - seen[m] - kept))
        seen[m] |= touched
    return tuple(reversed(drops))


def check_fits(schedule: Schedule, stages: Stages) -> None:
    """Raise StageError for a table whose chunks are on other stages than the model's."""
    last = len(stages.ranks) - 1
    ways = (stages.way, tuple(last - s for s in stages.way))
    if schedule.ways == ways[: len(schedule.ways)]:
        return
    found = f"chunks on stages {' and '.join(map(str, schedule.ways))}"
    why = f"the model's marks put its chunks on stages {stages.way}"
    write = (
        'with mw.to_static, set schedule_mode="auto"; or mark the model as the schedule, with values that only go '
        "forward: mw.split_pipeline orders modules by their calls if you pass example=(inputs,), and at= names where "
        "chunks begin"
    )
    raise StageError(f"schedule {schedule.name!r}", found, why, write)
