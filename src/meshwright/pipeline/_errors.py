"""Errors of schedules and stages."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class ScheduleError(MeshwrightError, ValueError):
    """A table of actions that is incomplete, contradicts itself, deadlocks, or needs more memory than there is."""


class StageError(MeshwrightError, ValueError):
    """A model that is not a chain of chunks, or not the chain that a schedule was made for."""
