"""What can be wrong with a schedule."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class ScheduleError(MeshwrightError, ValueError):
    """A table of actions that is incomplete, contradicts itself, gets stuck, or needs more memory than there is."""


class StageError(MeshwrightError, ValueError):
    """A model that is no chain of chunks, or not the one that a schedule was made for."""
