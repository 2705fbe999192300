"""How a plan for a module has a pipeline: data that a person may write."""

from __future__ import annotations

from dataclasses import dataclass

from ._plan import quoted


@dataclass(frozen=True, slots=True)
class Pipelining:
    """The modules at which the stages but the first begin, the schedule, and into how many microbatches a batch goes.

    >>> str(Pipelining(("layers.4",), "1F1B", 8))
    '1F1B of 8 microbatches, stages from layers.4'
    """

    split: tuple[str, ...]
    schedule: str = "1F1B"
    microbatches: int = 1

    @property
    def stages(self) -> int:
        return len(self.split) + 1

    def __str__(self) -> str:
        few = [*self.split[:2], *([f"... {self.split[-1]}"] if len(self.split) > 2 else [])]
        return f"{self.schedule} of {self.microbatches} microbatches, stages from {', '.join(few)}"

    def lines(self) -> list[str]:
        """The same in TOML, as a plan has it.

        >>> Pipelining(("layers.4",), "1F1B", 8).lines()
        ['split = ["layers.4"]', 'schedule = "1F1B"', 'microbatches = 8']
        """
        return [
            f"split = [{', '.join(map(quoted, self.split))}]", f"schedule = {quoted(self.schedule)}",
            f"microbatches = {self.microbatches}",
        ]  # fmt: skip
