"""Pipelines in the static mode: the model's stages, the schedule, and the run of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.comm import current_communicator
from meshwright.fixed_order import SameNumbersError, in_same_numbers
from meshwright.graph import Capture, Program, Value, apply_passes, record_gradients, verify
from meshwright.pipeline import (
    EPILOGUE,
    MicrobatchInputs,
    PipelineRun,
    ProgramMaker,
    RankParts,
    Schedule,
    StageError,
    Stages,
    check_fits,
    check_renewed,
    check_schedule,
    chunk_times,
    is_asynchronous,
    joint_epilogue,
    mirrored,
    parse_schedule,
    read_step_program,
    schedule_by_name,
    separate_batches,
    split_batch,
    split_stages,
    split_step,
    updates,
    weight_versions,
    with_epilogue,
    write_step_program,
)
from meshwright.search import Problem, find_schedule
from meshwright.tensor import leaves_in

from .._errors import StrategyError
from ..recording.strategy import Pipeline, Strategy
from ..recording.variants import Sizes, sizes_of

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedule of a pipeline, and the reason for it in one line."""

    schedule: Schedule
    why: str


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step in a pipeline: this rank's parts for each copy of the model, the intake of batches, and the schedule.

    `again` is the program of all updates of an asynchronous step but the first, if the first creates states.
    """

    copies: tuple[RankParts, ...]
    intake: MicrobatchInputs
    chosen: ScheduleChoice
    again: Program | None = None

    def after(self, act: Callable[[Program], Program]) -> PipelineStep:
        """Return the step with `act` applied to each of its programs."""
        again = None if self.again is None else act(self.again)
        return replace(self, copies=tuple(parts.after(act) for parts in self.copies), again=again)

    def runs(self, make: ProgramMaker, looks: bool = False) -> PipelineRun:
        """Return the step as a function of its inputs; `make` gives each of its programs as one.

        With `looks`, gradients can be looked at before the update, if it is a single one.
        """
        here, schedule = current_communicator().rank, self.chosen.schedule
        return PipelineRun(self.copies, schedule, here, self.intake, make, again=self.again, looks=looks)

    def end_to_end(self) -> tuple[Program, Mapping[str, Any]]:
        """Return all programs joined into one, to be read and saved, and the table that separates them."""
        program, table = write_step_program(self.copies, self.intake, self.chosen.schedule)
        return program, {**table, "why": self.chosen.why}


def split_joined_step(program: Program, table: Mapping[str, Any]) -> PipelineStep:
    """Return the step that `PipelineStep.end_to_end` joined. Raises Python's own errors for a table of another form."""
    copies, intake, schedule = read_step_program(program, table)
    check_schedule(schedule, stale=True)
    check_fits(schedule, copies[0].stages)
    return PipelineStep(copies, intake, ScheduleChoice(schedule, str(table["why"])))


class SeparateBatches(tuple[Any, ...]):
    """Batches that are passed one by one, as the microbatches of a step."""

    __slots__ = ()

    @property
    def firsts(self) -> list[Any]:
        """Return the first batch of each form, which is the sizes of its tensors."""
        found: dict[Sizes, Any] = {}
        for batch in self:
            found.setdefault(_sizes(batch), batch)
        return [*found.values()]

    @property
    def form_of(self) -> tuple[int, ...]:
        """Return the number of each batch's form."""
        sizes = [_sizes(batch) for batch in self.firsts]
        return tuple(sizes.index(_sizes(batch)) for batch in self)


def _sizes(batch: Sequence[Any]) -> Sizes:
    return sizes_of(list(leaves_in(batch)))


MicrobatchKind = tuple[int, int]
"""The direction of a microbatch through the chunks, 0 or 1, and the number of its form."""


def pipeline_step(
    captured: Sequence[Capture],
    batch: Sequence[Any],
    strategy: Strategy,
    update: Callable[[Program], Sequence[Program]],
) -> PipelineStep:
    """Return the step of a batch; `update` appends the optimizer's step and returns the first and any later variants.

    For `SeparateBatches`, there is one capture per form.

    Raises:
        StageError, ScheduleError: the schedule does not fit the model's chunks.
        StrategyError: the schedule is for another number of microbatches.
        SameNumbersError: the schedule has two copies of the model inside `same_numbers`.
    """
    staged = [split_stages(c.program) for c in captured]
    trained = {slot.name for slot in captured[0].slots if slot.is_parameter and slot.tensor.requires_grad}
    chosen = _choose_schedule(strategy.pipeline, *staged[0], trained)
    schedule = chosen.schedule
    for program, _ in staged:
        check_renewed(program, schedule)
    kinds = _microbatch_kinds(batch, schedule)
    if in_same_numbers() and len({*kinds}) > 1:
        raise SameNumbersError(
            f"schedule {schedule.name!r} inside same_numbers()",
            f"{len({*kinds})} copies of the model",
            "the microbatches of each copy are summed first, which is another order",
            "use a schedule with one copy, such as 1F1B or ZB-H1",
        )
    copies = _split_copies(captured, staged, sorted({*kinds}), schedule, strategy)
    copies, again = _with_updates(copies, schedule, update)
    return PipelineStep(copies, _intake_of(batch, copies, kinds, schedule, strategy), chosen, again)


def _microbatch_kinds(batch: Sequence[Any], schedule: Schedule) -> list[MicrobatchKind]:
    """Return the kind of each microbatch of a batch."""
    count = schedule.microbatches
    directions = [schedule.way_of(m) for m in range(count)]
    forms = batch.form_of if isinstance(batch, SeparateBatches) else (0,) * count
    return list(zip(directions, forms, strict=True))


def _split_copies(
    captured: Sequence[Capture],
    staged: Sequence[tuple[Program, Stages]],
    kinds: Sequence[MicrobatchKind],
    schedule: Schedule,
    strategy: Strategy,
) -> Sequence[RankParts]:
    """Return this rank's parts of the step of each kind of microbatch."""
    steps = [_staged_step(captured[form], staged[form], direction, strategy) for direction, form in kinds]
    _check_alike([stages for (direction, _), (_, stages) in zip(kinds, steps, strict=True) if direction == 0])
    stage = staged[0][1].of(current_communicator().rank)
    splits = stage is not None and schedule.splits(stage)
    options = bool(schedule.recomputed), splits, is_asynchronous(schedule)
    return [split_step(step, stages, *options) for step, stages in steps]


def _with_updates(
    copies: Sequence[RankParts], schedule: Schedule, update: Callable[[Program], Sequence[Program]]
) -> tuple[tuple[RankParts, ...], Program | None]:
    """Return the parts with the optimizer's update, and the program of later updates if it is another one."""
    per_step = updates(schedule)
    first, *others = update(joint_epilogue(copies, schedule.microbatches // per_step))
    _check_updates(schedule, copies, first, others)
    again = with_epilogue(copies, others[0])[0].programs[EPILOGUE] if others and per_step > 1 else None
    return with_epilogue(copies, first), again


def _intake_of(
    batch: Sequence[Any],
    copies: Sequence[RankParts],
    kinds: Sequence[MicrobatchKind],
    schedule: Schedule,
    strategy: Strategy,
) -> MicrobatchInputs:
    """Return how the microbatches get their inputs from a batch; `copies` are in the order of the sorted kinds."""
    if isinstance(batch, SeparateBatches):
        distinct = sorted({*kinds})
        copy_of = [distinct.index(kind) for kind in kinds]
        return separate_batches(copies, copy_of, len(list(leaves_in(batch[0]))))
    merge = strategy.microbatches
    assert merge is not None
    return split_batch(copies, schedule, merge.leaves(list(leaves_in(batch))))


def _check_updates(schedule: Schedule, copies: Sequence[RankParts], first: Program, others: Sequence[Program]) -> None:
    """Raise StageError if the several updates of an asynchronous step cannot be runs of one program."""
    if not is_asynchronous(schedule):
        return
    last = others[0] if others else first
    states = (first.outputs["state"], last.outputs["state"])
    if states[1] or not all(isinstance(v, Value) for v in states[0].values()):
        name, key = next(k for made in states for k, v in made.items() if made is states[1] or not isinstance(v, Value))
        raise StageError(
            f"schedule {schedule.name!r}",
            f"the optimizer's state {key!r} of {name}, which each update creates anew",
            "one program runs the several updates of a step",
            "use an optimizer whose counters are tensors, or schedule 1F1B",
        )
    if len(copies) > 1:
        raise StageError(
            f"schedule {schedule.name!r}",
            "microbatches of several sizes",
            "one program runs all updates, so all microbatches must have the same size",
            "use microbatches of one size, or schedule 1F1B",
        )


def _staged_step(
    captured: Capture, found: tuple[Program, Stages], way: int, strategy: Strategy
) -> tuple[Program, Stages]:
    """Return the step of one microbatch in one direction through the chunks, and its stages."""
    program, stages = split_stages(mirrored(captured.program, found[1])) if way else found
    return _step(replace(captured, program=program), strategy), stages


def _check_alike(found: Sequence[Stages]) -> None:
    if len({(stages.ranks, stages.way) for stages in found}) > 1:
        raise StageError(
            "microbatches of several sizes, in a pipeline",
            "a model whose chunks depend on the sizes of its batch",
            "one schedule runs all microbatches through the same chunks",
            "use marks that are the same for all sizes",
        )


def _step(captured: Capture, strategy: Strategy) -> Program:
    """Return the step of one microbatch, after the passes that need its forward and backward pass together."""
    step = verify(
        record_gradients(
            captured, current_communicator().rank, current_communicator().size, strategy.amp.scaling is not None
        )
    )
    return apply_passes(step, strategy.passes_on("step"))


def _choose_schedule(options: Pipeline, program: Program, stages: Stages, trained: Collection[str]) -> ScheduleChoice:
    if options.schedule_mode != AUTO:
        return ScheduleChoice(schedule_of(options, stages), f"{options.schedule_mode.splitlines()[0]}: as requested")
    times = chunk_times(program, stages, trained)
    problem = Problem(stages.way, options.accumulate_steps, times, capacity=options.capacity)
    found = find_schedule(problem, seconds=0.0)
    shares = ", ".join(" ".join(f"{t:.2f}" for t in times.of_chunk(c)) for c in range(len(stages.way)))
    return ScheduleChoice(
        found.schedule, f"{found}; times of F, B and W by chunk: {shares}; stages of the chunks: {stages.way}"
    )


def schedule_of(options: Pipeline, stages: Stages) -> Schedule:
    """Return the schedule for these stages, checked. Raises StrategyError or StageError if it does not fit."""
    found = _table(options, stages)
    check_fits(found, stages)
    if found.microbatches != options.accumulate_steps:
        raise StrategyError(
            f"pipeline.accumulate_steps = {options.accumulate_steps}",
            f"a table for {found.microbatches} microbatches",
            "the table fixes the number of microbatches",
            f"set accumulate_steps = {found.microbatches}",
        )
    _check_meaning(found, options)
    check_schedule(found, stale=options.asynchronous)
    return found


def _check_meaning(found: Schedule, options: Pipeline) -> None:
    """Raise an error unless `asynchronous` says whether the schedule updates weights while batches are in flight."""
    if is_asynchronous(found) == options.asynchronous:
        return
    if options.asynchronous:
        raise StrategyError(
            "pipeline.asynchronous = true",
            f"schedule {found.name!r}, with one update after all microbatches",
            "this schedule is synchronous: its step equals a step on one device",
            'set schedule_mode = "PipeDream-2BW", or asynchronous = false',
        )
    versions = " and ".join(map(str, weight_versions(found)))
    raise StageError(
        f"schedule {found.name!r}",
        f"{versions} versions of the weights on its ranks",
        "a synchronous step updates weights once, after all of its microbatches, as on one device",
        'use "ZB-H1" or "ZB-2p", which fill the same bubbles; or set pipeline.asynchronous = true with mw.to_static to '
        "accept gradients of older weights",
    )


def _table(options: Pipeline, stages: Stages) -> Schedule:
    if "\n" in options.schedule_mode:
        return parse_schedule(options.schedule_mode)
    known = schedule_by_name(options.schedule_mode)
    ranks = len(stages.ranks)
    return known.build(ranks, options.accumulate_steps, max(1, len(stages.way) // ranks))
