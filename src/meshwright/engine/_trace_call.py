"""One collective or message, as `trace_comm` tells of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One collective or message of a rank: what it is, the bytes that come by it, and where the program asked for it.

    `step` is the step of a conversion that needs it, `axes` those of the mesh along which its `group` lies; both are
    empty for calls that are no conversion's. In a backward pass `line` and `module` are those of the forward pass whose
    gradient needs it, where that is known. `at` is the line that was running. It `began` at a time of the clock, in
    seconds since 1970, took so many `seconds`, waiting for other ranks included, and was done `aside` of the rank's own
    thread or by it. Messages have a `peer` and a `tag`.
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
