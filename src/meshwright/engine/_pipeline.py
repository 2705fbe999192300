"""A pipeline in the static mode: the model's stages, its schedule, and the run of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.comm import current
from meshwright.graph import Capture, Program, apply_passes, record_gradients, verify, work_of
from meshwright.pipeline import (
    BEHIND,
    Parts,
    PipelineRun,
    Schedule,
    Stages,
    Times,
    behind_all,
    check,
    check_fits,
    known,
    mirrored,
    parse_schedule,
    staged,
    taken_apart,
    with_behind,
)
from meshwright.search import Problem, find_schedule

from ._errors import StrategyError
from ._strategy import Pipeline, Strategy

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The schedule of a pipeline, and why it is that one, in a line."""

    schedule: Schedule
    why: str


def ways_of(
    captured: Capture, strategy: Strategy, update: Callable[[Program], Program]
) -> tuple[tuple[Parts, ...], Chosen]:
    """The parts of this rank for each way of the schedule, and the schedule; `update` puts the optimizer's step behind.

    Raises StageError, or ScheduleError, for a table that is none for the model's chunks.
    """
    program, stages = staged(captured.program)
    chosen = _chosen(strategy.pipeline, program, stages)
    schedule = chosen.schedule
    opposite = [staged(mirrored(captured.program, stages)) for _ in schedule.ways[1:]]
    recompute = bool(schedule.recomputed)
    ways = [
        taken_apart(_step(replace(captured, program=p), strategy), s, recompute)
        for p, s in ((program, stages), *opposite)
    ]
    return with_behind(ways, update(behind_all(ways, schedule.microbatches))), chosen


def _step(captured: Capture, strategy: Strategy) -> Program:
    """The step of one microbatch, after the passes that look at its forward and backward pass together."""
    step = verify(record_gradients(captured, current().rank, current().size))
    return apply_passes(step, strategy.passes_on("step"))


def _chosen(options: Pipeline, program: Program, stages: Stages) -> Chosen:
    if options.schedule_mode != AUTO:
        return Chosen(schedule_of(options, stages), f"{options.schedule_mode.splitlines()[0]}: as asked")
    forward = _forward_times(program, stages)
    found = find_schedule(Problem(stages.way, options.accumulate_steps, Times(forward, forward, forward)), seconds=0.0)
    shares = ", ".join(f"{t:.2f}" for t in forward)
    return Chosen(found.schedule, f"{found}, for forward times {shares} of the chunks on stages {stages.way}")


def _forward_times(program: Program, stages: Stages) -> tuple[float, ...]:
    """Each chunk's share of the forward pass's operations, the largest as 1; a gradient counts as much, twice."""
    flops = [0.0] * len(stages.way)
    for node in program.nodes:
        if node.origin.chunk is not None and node.origin.chunk >= 0:
            flops[node.origin.chunk] += work_of(node).flops
    most = max(flops, default=0.0) or 1.0
    return tuple(max(f / most, 1e-3) for f in flops)


def schedule_of(options: Pipeline, stages: Stages) -> Schedule:
    """The table for these stages, checked."""
    found = _table(options, stages)
    check_fits(found, stages)
    if found.microbatches != options.accumulate_steps:
        raise StrategyError(
            f"pipeline.accumulate_steps = {options.accumulate_steps}", f"a table for {found.microbatches} microbatches",
            "a table names its microbatches", f"accumulate_steps = {found.microbatches}",
        )  # fmt: skip
    check(found)
    return found


def _table(options: Pipeline, stages: Stages) -> Schedule:
    if "\n" in options.schedule_mode:
        return parse_schedule(options.schedule_mode)
    how = known(options.schedule_mode)
    ranks, microbatches = len(stages.ranks), options.accumulate_steps
    if not how.takes:
        return how.make(ranks, microbatches)
    return how.make(ranks, microbatches, max(1, len(stages.way) // ranks))


def whole_program(ways: Sequence[Parts], run: PipelineRun) -> Program:
    """The step of one microbatch with what is done once, to be read; way after way."""
    behind = ways[0].programs[BEHIND]
    made = {v for node in behind.nodes for v in node.outs}
    nodes = (node for parts in ways for node in parts.step.nodes if not made & {*node.outs})
    specs = {v: spec for program in (*(parts.step for parts in ways), behind) for v, spec in program.specs.items()}
    return replace(behind, inputs=run.inputs, nodes=(*nodes, *behind.nodes), specs=specs)
