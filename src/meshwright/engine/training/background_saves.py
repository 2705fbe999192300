"""The checkpoints of a training run: each is written in the background, and a failure is reported once on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint import CheckpointError, CheckpointWarning, Saving
from meshwright.layout import warn_user

from .training_events import EventListener

ON_FAILED_SAVE = ("stop", "continue")
"""The choices after a checkpoint could not be written."""


class BackgroundSaves:
    """The checkpoint that is being written, and the latest one that is complete."""

    def __init__(self, on_failure: str) -> None:
        self._goes_on = on_failure == "continue"
        self._saving: Saving | None = None
        self.path: Path | None = None

    @property
    def failed(self) -> bool:
        """True if this rank knows of a failure that has not been reported."""
        return self._saving is not None and self._saving.failed

    def begin(self, step: int, save: Callable[[], Saving], say: EventListener) -> None:
        """Begin the checkpoint of a step, once the one before is complete; every rank calls it."""
        self.finish(step, say)
        try:
            self._saving = save()
        except CheckpointError as error:
            self._tell(error, step, say)
        else:
            say({"event": "checkpoint", "step": step, "path": str(self._saving.path)})

    def finish(self, step: int, say: EventListener) -> None:
        """Wait for the checkpoint that is being written, if there is one; every rank calls it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            self.path = saving.wait()
        except CheckpointError as error:
            self._tell(error, step, say)

    def _tell(self, error: CheckpointError, step: int, say: EventListener) -> None:
        """Report a failure, on every rank. Raises it if the run is to stop."""
        say({"event": "failed checkpoint", "step": step, "error": str(error), "goes_on": self._goes_on})
        if not self._goes_on:
            raise error
        warn_user(f"the checkpoint of a step could not be saved, and the run continues\n{error}", CheckpointWarning)
