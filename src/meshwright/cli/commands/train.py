"""`meshwright train`: run the main job on a mesh of ranks, then the same steps on one device."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console

from meshwright.cli.commands.run import is_one_rank, traced
from meshwright.cli.commands.training_progress import progress, side_by_side
from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.files import check_folder
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError, share_out

if TYPE_CHECKING:
    from meshwright.engine import Training, TrainingEnd
    from meshwright.models import Job


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of both runs of a job."""

    communicator: str
    mesh: dict[str, int]
    steps: int
    losses: list[float]
    one_device: list[float]
    largest_relative_difference: float
    seconds: float
    one_device_seconds: float


def train(settings: argparse.Namespace, argv: list[str]) -> int:
    """Return 0 if the largest relative difference between both runs is within the tolerance."""
    # Set before torch is imported: threads that wait without spinning are as fast, and much faster on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from meshwright.layout import MeshwrightError
    from meshwright.models import Job, LlamaConfig

    try:
        mesh = settings.mesh or (share_out(settings.ranks) if settings.ranks else Job().mesh)
        model = LlamaConfig.of_width(settings.hidden, settings.layers)
        job = Job(model, mesh, settings.steps, settings.batch, settings.seq, settings.seed)
        job = replace(job, microbatches=settings.microbatches)
    except MeshwrightError as error:
        raise UsageError(str(error)) from error
    check_folder(settings.trace)
    try:
        return run_job(job, settings, argv)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED


def run_job(job: Job, settings: argparse.Namespace, argv: list[str]) -> int:
    """Run a job, and return its exit code."""
    kept = settings.save or settings.log or settings.tensorboard or settings.save_every
    if not settings.processes:
        return run_simulated_with_log(job, settings) if kept else report(run_simulated(job, settings.trace), settings)
    if not is_one_rank():
        from meshwright.comm import launch

        return launch(["-m", "meshwright", *argv], job.ranks)
    return run_as_process_with_log(job, settings) if kept else run_as_process(job, settings)


def run_simulated_with_log(job: Job, settings: argparse.Namespace) -> int:
    """Run the job with a log and checkpoints, with all ranks in this process."""
    from meshwright.comm import simulate
    from meshwright.engine import stop_signals
    from meshwright.models import train_on

    how = training_options(job, settings)

    def one() -> TrainingEnd:
        with traced(settings.trace):
            return train_on(job, how)

    with stop_signals():
        return report_run(simulate(one, job.ranks)[0], settings)


def run_as_process_with_log(job: Job, settings: argparse.Namespace) -> int:
    """Run the job with a log and checkpoints, with this process as one rank."""
    from meshwright.comm import init_process
    from meshwright.models import train_on

    rank = init_process().rank
    how = training_options(job, settings)
    with traced(settings.trace):
        end = train_on(job, how)
    return report_run(end, settings) if rank == 0 else end.exit_code


def training_options(job: Job, settings: argparse.Namespace) -> Training:
    from meshwright.engine import Training
    from meshwright.layout import MeshwrightError
    from meshwright.models import AXES

    plan = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, job.mesh, strict=True))
    try:
        return Training(
            job.steps,
            settings.save,
            settings.save_every,
            log=settings.log,
            tensorboard=settings.tensorboard,
            plan=f"{plan}, as the model is marked",
        )
    except MeshwrightError as error:
        raise UsageError(str(error)) from error


def report_run(end: TrainingEnd, settings: argparse.Namespace) -> int:
    """Print the result of a run in one line, and return its exit code."""
    last = end.begun + len(end.losses)
    if settings.json:
        path = str(end.checkpoint) if end.checkpoint else None
        print_json({"begun": end.begun, "losses": end.losses, "stopped": end.stopped, "checkpoint": path})
        return end.exit_code
    steps = f"steps {end.begun + 1} to {last}, loss {end.losses[-1]:.6f}" if end.losses else f"no step after {last}"
    print_text(
        f"{steps}{', stopped by SIGTERM' if end.stopped else ''}{f', {end.checkpoint}' if end.checkpoint else ''}"
    )
    return end.exit_code


def run_simulated(job: Job, trace: str | None) -> Outcome:
    """Run the job with all ranks in this process, and compare it with one device."""
    from meshwright.comm import simulate
    from meshwright.models import train_on_mesh

    start = perf_counter()
    with progress(f"{job.ranks} simulated ranks", job.steps, job.tokens, Console(stderr=True)) as on_step:

        def one() -> list[float]:
            with traced(trace):
                return train_on_mesh(job, on_step, _print_schedule)

        losses = simulate(one, job.ranks)[0]
    return compare_with_one_device(job, "simulated", losses, perf_counter() - start)


def _print_schedule(why: str) -> None:
    """Print the schedule of the pipeline in one line."""
    Console(stderr=True).print(f"pipeline: {why}", highlight=False)


def run_as_process(job: Job, settings: argparse.Namespace) -> int:
    """Run the job with this process as one rank; rank 0 shows the progress, and then trains on one device."""
    from meshwright.comm import init_process
    from meshwright.models import train_on_mesh

    if init_process().rank != 0:
        with traced(settings.trace):
            train_on_mesh(job)
        return OK
    start = perf_counter()
    show = progress(f"{job.ranks} processes", job.steps, job.tokens, Console(stderr=True))
    with traced(settings.trace), show as on_step:
        losses = train_on_mesh(job, on_step, _print_schedule)
    return report(compare_with_one_device(job, "processes", losses, perf_counter() - start), settings)


def compare_with_one_device(job: Job, communicator: str, losses: list[float], seconds: float) -> Outcome:
    """Return both results, after the same steps in plain torch with all the cores of this machine."""
    import torch

    from meshwright.models import AXES, largest_difference
    from meshwright.models import train as train_plain

    torch.set_num_threads(os.cpu_count() or 1)
    start = perf_counter()
    with progress("one device", job.steps, job.tokens, Console(stderr=True)) as on_step:
        one = train_plain(job, on_step=on_step)
    mesh: dict[str, int] = dict(zip(AXES, job.mesh, strict=True))
    difference = largest_difference(losses, one)
    return Outcome(communicator, mesh, job.steps, losses, one, difference, seconds, perf_counter() - start)


def report(outcome: Outcome, settings: argparse.Namespace) -> int:
    """Print both losses. Returns FAILED if they differ too much or are not numbers."""
    good = outcome.largest_relative_difference <= settings.tolerance
    if settings.json:
        print_json(asdict(outcome))
        return OK if good else FAILED
    console = Console(file=sys.stdout)
    ranks = " x ".join(f"{name} {size}" for name, size in outcome.mesh.items())
    console.print(side_by_side((ranks, "one device"), outcome.losses, outcome.one_device))
    verdict = "within" if good else "[bold]above[/bold]"
    console.print(
        f"largest relative difference over {outcome.steps} steps: {outcome.largest_relative_difference:.1e}, "
        f"{verdict} {settings.tolerance:g}"
    )
    return OK if good else FAILED
