"""Checks of a device, and the device that they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class WrongResult(Exception):
    """A check has found numbers or states that are wrong; the text names them."""


class NotRun(Exception):
    """A check does not apply to this device; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """The device that is checked, as a worker sees it.

    `count` is the number of such devices, `dtypes` are the floating-point types that it has, and `folder` is an empty
    folder that all ranks of a worker share. `through_host` is True if processes share devices.
    """

    device: torch.device
    count: int
    dtypes: tuple[torch.dtype, ...]
    folder: Path
    through_host: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One check: a function that raises `WrongResult` or `NotRun`, or returns a text for people.

    It runs on each of `processes` ranks, in a process that is ended after `limit` seconds.
    """

    level: int
    name: str
    run: Callable[[Target], str | None]
    processes: int = 1
    limit: float = 60.0

    @property
    def key(self) -> str:
        """Return the name with the level, which no other check has."""
        return f"L{self.level} {self.name}"
