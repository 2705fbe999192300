"""Seconds of operators on one device, from the sizes that one rank computes.

Every number may be an array with one element per candidate, so a search prices all its candidates at once.

A matmul is divided into tiles, which the device's units compute in waves. Three constants are the same for every
device: the rate of each tile size, the part of a half-empty last wave that is lost, and the k at which a product is
worth its start. The rate of a long product of whole waves is a number of the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ._device import MICRO, Device

Numbers = float | NDArray[np.float64]
"""A number, or an array with one number per candidate."""
Flags = bool | NDArray[np.bool_]
"""A truth value, or an array with one per candidate."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and its rate relative to the largest tile."""
WHOLE = 64
"""Elements per line of memory. Sizes that are not multiples of it fill their last lines only partly."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Constants of all devices, fitted to measured runs by `python -m benchmarks predict`, which reports the errors.

    `writes` is the exposed time to write the results of a matmul, relative to the time of their bytes at the full
    bandwidth of the memory. So a product with a short k reaches less of its rate. `emptiness` is the part of a
    half-empty wave that is lost. `ragged` is the fraction of the rate that is left for sizes that are not multiples of
    64. `streamed` is the fraction of the memory bandwidth that an operator reaches. `launch` is the seconds to start an
    operator. `grouped` is the slowdown of products of many small groups. `host` is the seconds that a host needs for a
    layer's forward and backward pass. `exchange` is the seconds that a host needs in each pass to send tokens to
    experts and back. `expert` is the seconds that a host needs for each expert of a rank in a forward pass. `wait` is
    the seconds that ranks wait for each other in each exchange, unless graphs start it. `biased` is the bytes of memory
    traffic for each number to which experts add a bias, forward and backward.
    """

    writes: float = 1.0
    emptiness: float = 0.95
    ragged: float = 0.6
    streamed: float = 0.77
    launch: float = 2 * MICRO
    grouped: float = 1.17
    host: tuple[float, float] = (0.8e-3, 1.35e-3)
    exchange: float = 2e-3
    expert: float = 80 * MICRO
    wait: float = 0.35e-3
    biased: float = 44.0


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of the operators that layers consist of, on a device whose operators take `slower` times as long.

    >>> from meshwright.cost import device_of
    >>> round(float(KernelTimes(device_of("A100")).matmul(4096, 4096, 4096)), 5)
    0.00063
    """

    device: Device
    habits: Habits = field(default_factory=Habits)
    slower: Numbers = 1.0

    def matmul(
        self, m: Numbers, n: Numbers, k: Numbers, groups: Numbers = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> Numbers:
        """Return the seconds of `m k * k n -> m n`, with `groups` products in one launch."""
        rate = self.device.rate(dtype) / self.device.units
        ragged = np.where(((np.mod(n, WHOLE) == 0) & (np.mod(k, WHOLE) == 0)) | (groups > 1), 1.0, self.habits.ragged)
        written = self.habits.writes * self.device.rate(dtype) / self.device.bandwidth
        best: Numbers = np.inf
        for rows, columns, share in TILES:
            tiles = np.ceil(m / rows) * np.ceil(n / columns) * groups
            waves = np.maximum(1.0, tiles / self.device.units)
            lost = 1 + (np.ceil(waves) / waves - 1) * self.habits.emptiness
            seconds = waves * lost * (2 * rows * columns * (k + written) / (rate * share))
            best = np.minimum(best, seconds)
        moved = 2 * (groups * (m * k + k * n + m * n))
        return np.maximum(best / ragged, moved / self._bandwidth) * self.slower + self.habits.launch

    def attention(self, queries: Numbers, keys: Numbers, width: Numbers, heads: Numbers) -> tuple[Numbers, Numbers]:
        """Return the seconds of fused attention, forward and backward.

        `width` is the width of a key plus that of a value, `heads` the number of all heads. The backward pass computes
        the scores again: five products instead of two.
        """
        flops = 2 * (queries * keys * (width * heads)) * self.slower
        rate = self.device.peak(torch.bfloat16)
        forward, backward = self.device.attention
        return flops / (rate * forward) + self.habits.launch, 2.5 * flops / (rate * backward) + 2 * self.habits.launch

    def stream(self, nbytes: Numbers) -> Numbers:
        """Return the seconds of an operator whose time is that of the bytes it reads and writes."""
        return nbytes / self._bandwidth * self.slower + self.habits.launch

    @property
    def _bandwidth(self) -> float:
        return self.device.bandwidth * self.habits.streamed
