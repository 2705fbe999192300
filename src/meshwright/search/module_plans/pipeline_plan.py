"""Pipeline of a plan for a module, as data that a person may write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pipelining:
    """Split points, schedule and number of microbatches of a pipeline.

    `split` names the modules at which all chunks but the first begin. `way` has the stage of each chunk, if stages have
    several; without it, each stage has one chunk, in order.

    >>> str(Pipelining(("layers.4",), "1F1B", 8))
    '1F1B of 8 microbatches, stages from layers.4'
    >>> str(Pipelining(("layers.1", "layers.2", "layers.3"), "ZB-V", 8, (0, 1, 1, 0)))
    'ZB-V of 8 microbatches, 4 chunks on stages 0 1 1 0, from layers.1, layers.2, ... layers.3'
    """

    split: tuple[str, ...]
    schedule: str = "1F1B"
    microbatches: int = 1
    way: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return 1 + (max(self.way) if self.way else len(self.split))

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the indices of a stage's chunks."""
        return tuple(chunk for chunk, at in enumerate(self.way) if at == stage) if self.way else (stage,)

    def begins(self, chunk: int) -> str:
        """Return the module at which a chunk begins, or an empty text for the beginning of the model."""
        return self.split[chunk - 1] if chunk else ""

    def __str__(self) -> str:
        few = [*self.split[:2], *([f"... {self.split[-1]}"] if len(self.split) > 2 else [])]
        where = f"{len(self.way)} chunks on stages {_stages_text(self.way)}, from" if self.way else "stages from"
        return f"{self.schedule} of {self.microbatches} microbatches, {where} {', '.join(few)}"

    def settings(self) -> dict[str, object]:
        """Return the pipeline as the text of a plan has it.

        >>> Pipelining(("layers.4",), "1F1B", 8).settings()
        {'split': ('layers.4',), 'schedule': '1F1B', 'microbatches': 8}
        """
        found: dict[str, object] = {"split": self.split, "schedule": self.schedule, "microbatches": self.microbatches}
        return found | ({"way": self.way} if self.way else {})


def _stages_text(way: tuple[int, ...]) -> str:
    """Return the stages in order, as text; for a long list, only the first ones and the last."""
    shown = [*map(str, way)]
    return " ".join(shown if len(shown) <= SHOWN else [*shown[: SHOWN - 2], "...", shown[-1]])


SHOWN = 8
"""Upper bound on the chunks that are shown in a line."""
