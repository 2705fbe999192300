"""One finding of `meshwright doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. The whole check fails if something `needed` is not `good`."""

    name: str
    found: str
    good: bool = True
    needed: bool = True
    write: str = ""

    @property
    def state(self) -> str:
        """Return the result in one word."""
        return "ok" if self.good else "MISSING" if self.needed else "without"
