"""Show the progress of a training run, and a table of the two losses side by side."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@contextmanager
def progress(name: str, steps: int, tokens: int, console: Console) -> Generator[Callable[[int, float], None]]:
    """Show a bar with loss, tokens per second and the time left; yields the function to call after each step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{name:>20}", total=steps, loss="-", speed="-")
        start = perf_counter()

        def on_step(step: int, loss: float) -> None:
            speed = tokens * (step + 1) / (perf_counter() - start)
            bar.update(task, completed=step + 1, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")

        yield on_step


def side_by_side(names: tuple[str, str], ours: Sequence[float], reference: Sequence[float], every: int = 10) -> Table:
    """Return a table of every tenth step, the first and the last, with the relative difference."""
    table = Table("step", *names, "relative difference")
    for column in table.columns:
        column.justify = "right"
    last = len(ours) - 1
    for step, (a, b) in enumerate(zip(ours, reference, strict=True)):
        if step % every == 0 or step == last:
            table.add_row(str(step + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(b):.1e}")
    return table
