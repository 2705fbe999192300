"""Report the events of a training run: as lines of JSON, as curves, and as a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .._errors import TrainingError
from .log_file import log_file

Event = Mapping[str, Any]
"""An event with its step and its numbers.

`event` is start, step, evaluation, checkpoint, failed checkpoint, error or end.
"""
EventListener = Callable[[Event], None]
Where = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """The numbers of one step; `mfu` is the share of the devices' peak, if the work and the peak are known.

    `peak_memory` is the most bytes that a rank has held so far, of its device or of its process. A `gradient_norm` that
    is not finite, with a `loss_scale`, means that the update was skipped.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second_per_device: float
    mfu: float | None
    peak_memory: int
    loss_scale: float | None = None

    @property
    def event(self) -> Event:
        return {"event": "step", **asdict(self)}


@contextmanager
def event_reporter(
    steps: int, log: Where | None, tensorboard: Where | None, show: bool, tell: EventListener | None
) -> Generator[EventListener]:
    """Yield the function to call with each event; it passes the event to all listeners."""
    with ExitStack() as stack:
        listeners = [] if tell is None else [tell]
        if log is not None:
            listeners.append(stack.enter_context(log_file(Path(log))))
        if tensorboard is not None:
            listeners.append(stack.enter_context(_curves(tensorboard)))
        if show:
            listeners.append(stack.enter_context(_show_progress(steps)))

        def all_of_them(event: Event) -> None:
            for listener in listeners:
                listener(event)

        yield all_of_them


@contextmanager
def _curves(folder: Where) -> Generator[EventListener]:
    """Write numbers by step for TensorBoard, which is imported only here."""
    try:
        writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
    except ImportError as error:
        raise TrainingError(
            f"tensorboard={str(folder)!r}",
            f"{error}",
            "TensorBoard's own package writes the curves",
            "run pip install tensorboard, or pass log=FILE alone",
        ) from error

    def draw(event: Event) -> None:
        for name, number in _numbers(event):
            writer.add_scalar(f"{event['event']}/{name}", number, event["step"])

    try:
        yield draw
    finally:
        writer.close()


def _numbers(event: Event) -> Iterator[tuple[str, float]]:
    if event["event"] in ("step", "evaluation"):
        yield from ((k, v) for k, v in event.items() if k != "step" and isinstance(v, (int, float)))


@contextmanager
def _show_progress(steps: int) -> Generator[EventListener]:
    """Show the banner, a bar with the numbers of the latest step, and a line for every other event."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[numbers]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps, numbers="")

        def show(event: Event) -> None:
            if event["event"] == "start":
                bar.update(task, completed=event["step"])
            if event["event"] == "step":
                bar.update(task, completed=event["step"], numbers=_numbers_of_step(event))
            else:
                bar.console.print(line_of(event), highlight=False, markup=False)

        yield show


def _numbers_of_step(event: Event) -> str:
    parts = [
        f"loss {event['loss']:.4f}",
        f"norm {event['gradient_norm']:.3g}",
        f"lr {event['learning_rate']:.3g}",
        f"{event['tokens_per_second_per_device']:,.0f} tokens/s a device",
        *([] if event["mfu"] is None else [f"MFU {event['mfu']:.1%}"]),
        f"{event['peak_memory'] / 2**20:,.0f} MiB",
    ]
    return "  ".join(parts)


def line_of(event: Event) -> str:
    """Return an event as a line for a person.

    >>> line_of({"event": "evaluation", "step": 20, "loss": 0.5})
    'evaluation at step 20: loss 0.5'
    """
    kind, rest = event["event"], {k: v for k, v in event.items() if k not in ("event", "step") and v is not None}
    if kind == "start":
        return "\n".join(f"{name.replace('_', ' '):>14}  {_written(value)}" for name, value in rest.items())
    return f"{kind} at step {event['step']}: {', '.join(f'{k} {_written(v)}' for k, v in rest.items())}"


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
