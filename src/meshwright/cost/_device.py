"""Devices: rates, memory, and the table of devices that are known by name.

Peaks are the vendor's, for dense products (no sparsity). `reach` is the fraction of the peak that large products of
16-bit numbers reach in training. The best measured matmul reaches more, because a device runs slower under long load.
Sources: "ml-engineering" is stas00/ml-engineering (compute/accelerator, network), tables of vendors' specifications and
of measured matmuls. The memory that a process can address comes from drivers and from errors of full devices ("total
capacity of 79.15 GiB"). It is the gigabytes of the data sheet, of 2^30 bytes each, less the part that the device keeps.
The fractions of the peak are those at which `python -m benchmarks predict` agrees with published runs. Devices without
such runs (`DATA_SHEET`) have the rates of their data sheets, and one fraction for all.
"measured" is one core of a Xeon server with AMX, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from meshwright.layout import write_dtype

from ._errors import CostError, known_by

TERA, GIGA, MICRO, GIBI = 1e12, 1e9, 1e-6, 2**30
DATA_SHEET = "data sheet"
"""Beginning of the source of a device whose rates were compared with no published run."""
NARROWEST = torch.float4_e2m1fn_x2
"""Numbers of 4 bits, two per byte."""


@dataclass(frozen=True, slots=True)
class Device:
    """Rates in operations and bytes per second, memory in bytes, `overhead` in seconds per launched operator.

    `addressable` is a pair of bytes: the memory in the data sheet, and the memory that a process can address. It is
    ignored if `memory` differs from the data sheet.

    `units` is the number of parts of the device that work on one tile each. `reach8` and `reach4` are the fractions of
    the peak that products of 8-bit and 4-bit numbers reach. `attention` are those of fused attention, forward and
    backward.

    >>> DEVICES["H100"]
    H100: 990 TFLOP/s bf16, 67 TFLOP/s f32, 3350 GB/s, 80 GB

    Raises:
        CostError: a rate is not positive and finite, or `overhead` is negative.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    bandwidth: float
    memory: float
    overhead: float = 4 * MICRO
    reach: float = 0.8
    source: str = ""
    units: int = 1
    attention: tuple[float, float] = (0.5, 0.4)
    reach8: float = 0.42
    reach4: float = 0.4
    addressable: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        shares = (self.reach, self.reach8, self.reach4, *self.attention)
        rates = (*self.flops.values(), self.bandwidth, self.memory, self.units, *(self.addressable or ()), *shares)
        if not self.flops or not all(0 < rate < float("inf") for rate in rates) or not self.overhead >= 0:
            raise CostError(
                f"a device {self.name!r}",
                f"rates {dict(self.flops)}, {self.bandwidth} B/s, {self.memory} B, {self.overhead} s",
                "rates must be positive and finite, because seconds are work divided by rates",
                "write Device(name, {torch.float32: operations per second}, bytes per second, bytes)",
            )

    @property
    def available(self) -> float:
        """Bytes of memory that a process can address.

        >>> round(DEVICES["H100"].available / 2**30, 1)
        79.2
        """
        sheet, own = self.addressable or (self.memory, self.memory)
        return own if self.memory == sheet else self.memory

    def peak(self, dtype: torch.dtype) -> float:
        """Return the vendor's operations per second in `dtype`.

        A dtype without an entry has the rate of float32. Numbers of 4 bits without an entry have the rate of 8 bits,
        and bfloat16 without an entry has the rate of float16.
        """
        if dtype == torch.bfloat16 and dtype not in self.flops:
            dtype = torch.float16
        if dtype == NARROWEST and dtype not in self.flops:
            dtype = torch.float8_e4m3fn
        return self.flops.get(dtype) or self.flops.get(torch.float32) or max(self.flops.values())

    def rate(self, dtype: torch.dtype) -> float:
        """Return the operations per second in `dtype` that a large matmul reaches."""
        return self.peak(dtype) * self.share(dtype)

    def share(self, dtype: torch.dtype) -> float:
        """Return the fraction of the peak in `dtype` that a large matmul reaches."""
        if dtype == NARROWEST and dtype in self.flops:
            return self.reach4
        return self.reach8 if dtype in (torch.float8_e4m3fn, NARROWEST) else self.reach

    def seconds(self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32) -> float:
        """Return the seconds of an operator by the roofline model: `flops` operations, `nbytes` read and written.

        >>> round(DEVICES["H100"].seconds(0, 3350e6), 6)
        0.001004
        """
        return self.overhead + max(flops / self.rate(dtype), nbytes / self.bandwidth)

    def __repr__(self) -> str:
        skipped = torch.float16 if torch.bfloat16 in self.flops else torch.bfloat16
        told = [t for t in _TOLD if t in self.flops and t != skipped]
        rates = [f"{self.flops[t] / TERA:.3g} TFLOP/s {write_dtype(t)}" for t in told]
        return f"{self.name}: {', '.join(rates)}, {self.bandwidth / GIGA:.0f} GB/s, {self.memory / GIGA:.0f} GB"


_TOLD = (torch.bfloat16, torch.float16, torch.float32)


def _rates(half: float, single: float, eighth: float = 0.0, fourth: float = 0.0) -> dict[torch.dtype, float]:
    rates = {torch.bfloat16: half, torch.float16: half, torch.float32: single}
    rates |= {torch.float8_e4m3fn: eighth, NARROWEST: fourth}
    return {dtype: rate * TERA for dtype, rate in rates.items() if rate}


def _without_bfloat16(device: Device) -> Device:
    return replace(device, flops={t: rate for t, rate in device.flops.items() if t != torch.bfloat16})


def _unmeasured(name: str, rates: tuple[float, ...], memory: tuple[float, float], units: int) -> Device:
    """Return a device with the rates of its data sheet, which it reaches as far as other such devices."""
    return _gpu(name, rates, memory, units, 0.6, (0.35, 0.28), f"{DATA_SHEET}, ml-engineering where it has one")


def _gpu(
    name: str,
    rates: tuple[float, ...],
    memory: tuple[float, float],
    units: int,
    reach: float,
    attention: tuple[float, float],
    source: str = "ml-engineering",
    reach8: float = 0.4,
    reach4: float = 0.4,
) -> Device:
    nbytes, bandwidth = memory
    return Device(
        name,
        _rates(*rates),
        bandwidth * GIGA,
        nbytes * GIGA,
        4 * MICRO,
        reach,
        source,
        units,
        attention,
        reach8,
        reach4,
        (nbytes * GIGA, ADDRESSABLE[name] * GIBI),
    )


ADDRESSABLE = {
    "V100": 31.7, "A100-40GB": 39.4, "A100": 79.2, "A100-PCIe": 79.2, "A800": 79.2, "H100": 79.2, "H100-HBM2e": 94.5,
    "H800": 79.2, "H200": 139.8, "B200": 178.3, "B300": 267.7, "GB200": 184.3, "GB300": 276.6, "MI300X": 192.0,
    "MI325X": 256.0, "Ascend-910B": 61.0, "H100-PCIe": 79.2, "H100-NVL": 93.0, "L40S": 44.4, "L4": 22.0,
    "A10G": 22.1, "RTX-A6000": 47.5, "RTX-3090": 23.7, "RTX-4090": 23.6, "MI355X": 288.0, "Gaudi2": 96e9 / GIBI,
    "Gaudi3": 128e9 / GIBI,
}  # fmt: skip
"""Device → GiB that a process can address: the data sheet's where no driver's report is at hand (MI355X, Gaudi)."""


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _without_bfloat16(_gpu("V100", (125, 15.7), (32, 900), 80, 0.68, (0.3, 0.3))),
        _gpu("A100-40GB", (312, 19.5), (40, 1555), 108, 0.76, (0.51, 0.39)),
        _gpu("A100", (312, 19.5), (80, 2000), 108, 0.76, (0.51, 0.39)),
        _gpu("A100-PCIe", (312, 19.5), (80, 1940), 108, 0.69, (0.47, 0.36)),
        _gpu("A800", (312, 19.5), (80, 2000), 108, 0.80, (0.50, 0.38)),
        _gpu("H100", (989.5, 67, 1979), (80, 3350), 132, 0.615, (0.34, 0.275), reach8=0.70),
        _gpu("H100-HBM2e", (989.5, 67, 1979), (96, 2400), 132, 0.535, (0.38, 0.32), "torchtitan", reach8=0.42),
        _gpu("H800", (989.5, 67, 1979), (80, 3350), 132, 0.68, (0.33, 0.27), reach8=0.69),
        _gpu("H200", (989.5, 67, 1979), (141, 4800), 132, 0.72, (0.36, 0.30), reach8=0.66),
        _gpu("B200", (2250, 80, 4500, 9000), (180, 8000), 148, 0.44, (0.40, 0.35), reach8=0.63),
        _gpu("B300", (2250, 80, 4500, 15000), (288, 8000), 148, 0.44, (0.40, 0.35), reach8=0.70),
        _gpu("GB200", (2500, 80, 5000, 10000), (186, 8000), 148, 0.50, (0.41, 0.36), reach8=0.68),
        _gpu("GB300", (2500, 80, 5000, 15000), (288, 8000), 148, 0.62, (0.41, 0.36), reach8=0.74),
        _gpu("MI300X", (1307, 163.4, 2614.9), (192, 5300), 304, 0.43, (0.25, 0.20)),
        _gpu("MI325X", (1307, 163.4, 2614.9), (256, 6000), 304, 0.48, (0.25, 0.20)),
        _gpu("Ascend-910B", (313, 78), (64, 1600), 24, 0.85, (0.38, 0.30), "recalled data sheet"),
        _unmeasured("H100-PCIe", (756, 51, 1513), (80, 2000), 114),
        _unmeasured("H100-NVL", (835, 60, 1671), (94, 3938), 132),
        _unmeasured("L40S", (362, 91.6, 733), (48, 864), 142),
        _unmeasured("L4", (121, 30.3, 242), (24, 300), 58),
        _unmeasured("A10G", (70, 35), (24, 600), 80),
        _unmeasured("RTX-A6000", (154.8, 38.7), (48, 768), 84),
        _unmeasured("RTX-3090", (71, 35.6), (24, 936), 82),
        _unmeasured("RTX-4090", (165.2, 82.6, 330.3), (24, 1008), 128),
        _unmeasured("MI355X", (2500, 157.3, 5000, 10100), (288, 8000), 256),
        _unmeasured("Gaudi2", (432, 54, 865), (96, 2460), 24),
        _unmeasured("Gaudi3", (1677, 229, 1677), (128, 3700), 64),
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
"""Known devices by name; float32 rates are those of plain float32, without tensor cores."""


def device_of(name: str) -> Device:
    """Return the device of this name.

    Raises:
        CostError: the name is unknown.
    """
    write = "Device(name, flops, bandwidth, memory), or a cluster file with the table [device],"
    return known_by(name, DEVICES, "device", write)


def name_of_device(reported: str) -> str | None:
    """Return the known device that is a word of the name that a driver reports; None if there is none.

    >>> name_of_device("NVIDIA A100-SXM4-80GB")
    'A100'
    """
    words = reported.replace("-", " ").split()
    return next((name for name in DEVICES if name in words), None)
