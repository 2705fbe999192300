"""All checks, by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..results.check import Check
from ..results.uses import FOUR_PROCESSES
from .device import DEVICE
from .operators import OPERATORS
from .simulated import SIMULATED
from .speed import SPEED
from .training import TRAINING
from .transport import programs

TRANSPORT = tuple(
    Check(3, f"{several}{name}", program, processes)
    for several, processes in (("", 2), (f"{FOUR_PROCESSES}: ", 4))
    for name, program in programs()
)
LEVELS: Mapping[int, Sequence[Check]] = {
    0: DEVICE,
    1: OPERATORS,
    2: SIMULATED,
    3: TRANSPORT,
    4: TRAINING,
    5: SPEED,
}
CHECKS: tuple[Check, ...] = tuple(check for level in LEVELS.values() for check in level)
