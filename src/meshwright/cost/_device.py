"""What one device does in a second, and what it holds; the devices that are known by name.

Peaks are dense (no sparsity) and those of the vendor; `reach` is the share of the peak that the best measured matmul
reaches. Sources: "ml-engineering" is stas00/ml-engineering (compute/accelerator, network), tables of vendors'
specifications and of measured matmuls; "measured" is one core of a Xeon server with AMX, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from meshwright.layout import write_dtype

from ._errors import CostError, known_by

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True, slots=True)
class Device:
    """Rates in operations and bytes per second, memory in bytes, `overhead` in seconds per launched operator.

    >>> DEVICES["H100"]
    H100: 990 TFLOP/s bf16, 67 TFLOP/s f32, 3350 GB/s, 80 GB
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    bandwidth: float
    memory: float
    overhead: float = 4 * MICRO
    reach: float = 0.8
    source: str = ""

    def __post_init__(self) -> None:
        if not self.flops or min(*self.flops.values(), self.bandwidth, self.memory, self.reach) <= 0:
            raise CostError(
                f"a device {self.name!r}", f"rates {dict(self.flops)}, {self.bandwidth} B/s, {self.memory} B",
                "seconds are work over rates, and rates are positive",
                "Device(name, {torch.float32: operations per second}, bytes per second, bytes)",
            )  # fmt: skip

    def rate(self, dtype: torch.dtype) -> float:
        """Operations per second in `dtype` that a matmul reaches; dtypes without an entry run as float32 does."""
        peak = self.flops.get(dtype) or self.flops.get(torch.float32) or max(self.flops.values())
        return peak * self.reach

    def seconds(self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32) -> float:
        """Seconds of one operator that does `flops` operations and reads and writes `nbytes`: the roofline.

        >>> round(DEVICES["H100"].seconds(0, 3350e6), 6)
        0.001004
        """
        return self.overhead + max(flops / self.rate(dtype), nbytes / self.bandwidth)

    def __repr__(self) -> str:
        rates = [f"{self.flops[t] / TERA:.3g} TFLOP/s {write_dtype(t)}" for t in _TOLD if t in self.flops]
        return f"{self.name}: {', '.join(rates)}, {self.bandwidth / GIGA:.0f} GB/s, {self.memory / GIGA:.0f} GB"


_TOLD = (torch.bfloat16, torch.float32)


def _rates(half: float, single: float) -> dict[torch.dtype, float]:
    return {torch.bfloat16: half * TERA, torch.float16: half * TERA, torch.float32: single * TERA}


def _gpu(name: str, half: float, single: float, memory: float, bandwidth: float, reach: float) -> Device:
    return Device(name, _rates(half, single), bandwidth * GIGA, memory * GIGA, reach=reach, source="ml-engineering")


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("V100", 125, 15.7, 32, 900, 0.8),
        _gpu("A100-40GB", 312, 19.5, 40, 1555, 0.87),
        _gpu("A100", 312, 19.5, 80, 2000, 0.87),
        _gpu("H100", 989.5, 67, 80, 3350, 0.8),
        _gpu("H200", 989.5, 67, 141, 4800, 0.8),
        _gpu("B200", 2250, 80, 180, 8000, 0.78),
        _gpu("MI300X", 1307, 163.4, 192, 5300, 0.51),
        Device(
            "cpu core",
            {torch.float32: 0.19 * TERA, torch.float64: 0.074 * TERA, torch.bfloat16: 1.48 * TERA},
            9.8 * GIGA,
            4 * GIGA,
            overhead=1.5 * MICRO,
            reach=1.0,
            source="measured",
        ),
    )
}
"""The devices by name; rates in float32 are those of plain float32, without tensor cores."""


def device_of(name: str) -> Device:
    """The device called so. Raises CostError for an unknown name."""
    return known_by(name, DEVICES, "device", "Device(name, flops, bandwidth, memory)")
