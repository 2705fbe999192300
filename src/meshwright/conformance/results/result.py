"""Results of checks, and how they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, WRONG, RAISED, HUNG, DIED, NOT_RUN = "ok", "WRONG", "RAISED", "HUNG", "DIED", "not run"
FAULTS = (WRONG, RAISED, HUNG, DIED)
"""The states of checks that failed, the most informative first."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check.

    `detail` holds wrong numbers, an error with its file and line, the reason why a check was not run, or a measured
    number.
    """

    level: int
    name: str
    state: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.state in FAULTS

    def __str__(self) -> str:
        return f"{self.state:<8} L{self.level} {self.name}{f'  {self.detail}' if self.detail else ''}"


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine of a worker: device type, number of devices, dtypes, name and versions."""

    device: str
    count: int
    dtypes: tuple[str, ...]
    name: str
    torch: str
    python: str
    system: str
    through_host: bool = False
    """True if processes shared the devices and communicated through the memory of the host."""

    def __str__(self) -> str:
        devices = f"{self.count} x {self.device} ({self.name})"
        transport = "; processes communicate through the host" if self.through_host else ""
        versions = f"torch {self.torch}, Python {self.python}, {self.system}"
        return f"{devices}; {', '.join(self.dtypes)}; {versions}{transport}"


@dataclass(frozen=True, slots=True)
class Report:
    """All results of a run; `facts` is None if no worker started."""

    facts: Facts | None
    results: tuple[Result, ...]
    on: str
    """The day of the run, such as "2026-11-26"."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of results of each state that occurs."""
        return Counter(each.state for each in self.results)

    @property
    def ok(self) -> bool:
        """True if some check is ok, and none failed."""
        return self.counts.get(OK, 0) > 0 and not any(each.failed for each in self.results)

    def data(self, uses: Sequence[Any]) -> dict[str, Any]:
        """Return the report as JSON has it; `uses` are the lines about the use of the machine."""
        return {
            "ok": self.ok,
            "on": self.on,
            "machine": None if self.facts is None else asdict(self.facts),
            "counts": dict(self.counts),
            "uses": [asdict(each) for each in uses],
            "results": [asdict(each) for each in self.results],
        }
