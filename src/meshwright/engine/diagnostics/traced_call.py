"""One collective or message in a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One collective or message of a rank: its kind, the bytes received by it, and the place that needs it.

    `step` is the step of a conversion that needs it, and `axes` are the mesh axes of its `group`; both are empty for
    calls outside conversions. In a backward pass, `line` and `module` are those of the forward pass whose gradient
    needs the call, if known. `at` is the line that was running. `began` is its start in seconds since 1970, and
    `seconds` its duration, including the wait for other ranks. `aside` is True if another thread than the rank's own
    made it. Messages have a `peer` and a `tag`.
    """

    kind: str
    text: str
    group: tuple[int, ...]
    axes: tuple[str, ...]
    step: str
    received: int
    stage: str
    line: str
    module: str
    at: str
    began: float = 0.0
    seconds: float = 0.0
    aside: bool = False
    peer: int | None = None
    tag: int = 0
