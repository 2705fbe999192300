"""What the devices have recorded: races, touches by the host, counters and the timeline."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from .backend import register


@dataclass(frozen=True, slots=True)
class Access:
    """One access of a kernel, of an allocation or of a free to a range of bytes."""

    work: str
    stream: str
    writes: bool
    bytes: tuple[int, int]
    place: str
    """File and line of the Python code; empty unless places are recorded."""

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        at = f" at {self.place}" if self.place else ""
        return f"{self.work} on {self.stream} {verb} bytes {self.bytes[0]} to {self.bytes[1]}{at}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to one block, at least one of them a write, that nothing orders."""

    block: int
    size: int
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"block {self.block} of {self.size} bytes: {self.first}; then, not ordered, {self.second}"


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of events since the start of the process, or between two points."""

    launches: int
    allocations: int
    host_reads: int
    """Values or data-dependent shapes that the host has waited for."""
    host_waits: int
    """Waits of the host for an event, a stream or a device, those of `host_reads` included."""
    forced_waits: int
    """Queued operators that ran at once because they have no meta kernel."""

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Timing:
    """Work on a stream, with its start and end in virtual seconds."""

    name: str
    device: int
    stream: int
    start: float
    end: float


class Counted:
    """The counts of a block of code, once it has ended."""

    counts: Counts


class Devices:
    """The devices of this process."""

    def __init__(self) -> None:
        self.core = register()
        self.count: int = self.core.device_count()

    def take_races(self) -> list[Race]:
        """Return the races found since the last call."""
        return [_race(report) for report in self.core.take_reports()]

    def take_host_touches(self) -> int:
        """Return the number of pages that the host has touched since the last call or error."""
        return self.core.take_host_touches()

    def counts(self) -> Counts:
        return Counts(**self.core.counters())

    @contextmanager
    def counting(self) -> Generator[Counted]:
        """Count the events inside the block."""
        before, counted = self.counts(), Counted()
        try:
            yield counted
        finally:
            counted.counts = self.counts() - before

    @contextmanager
    def priced(self, kernel: float, bytes_per_second: float, flops_per_second: float) -> Generator[None]:
        """Give kernels other durations in virtual time inside the block; `kernel` is the seconds of each launch."""
        before = self.core.exchange_prices(kernel, bytes_per_second, flops_per_second)
        try:
            yield
        finally:
            self.core.exchange_prices(*before)

    @contextmanager
    def recording_places(self) -> Generator[None]:
        """Record the line of Python of every launch inside the block, for the text of races."""
        self.core.record_places(True)
        try:
            yield
        finally:
            self.core.record_places(False)

    @contextmanager
    def recording_timeline(self) -> Generator[list[Timing]]:
        """Record the work that runs inside the block; the list is filled at its end."""
        timings: list[Timing] = []
        self.core.take_timeline()
        self.core.record_timeline(True)
        try:
            yield timings
        finally:
            self.core.record_timeline(False)
            timings += [Timing(*each) for each in self.core.take_timeline()]


def _race(report: dict[str, Any]) -> Race:
    first, second = (Access(**report[each]) for each in ("first", "second"))
    return Race(report["block"], report["size"], first, second)
