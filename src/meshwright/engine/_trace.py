"""Which collectives a program makes, in order, and by which of its lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from types import FrameType

from meshwright.comm import Call, Carrier, current
from meshwright.layout import ProcessMesh, module_path, user_frame
from meshwright.tensor import bucket_of, in_backward, place_of_gradient, places_kept

_HEAD = ("", "call", "by", "over", "bytes", "pass", "line", "module")
_NUMBERS = {"", "bytes"}


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One collective or message of a rank: what it is, the bytes that come by it, and where the program asked for it.

    `step` is the step of a conversion that needs it, `axes` those of the mesh along which its `group` lies; both are
    empty for calls that are no conversion's. In a backward pass `line` and `module` are those of the forward pass whose
    gradient needs it, where that is known. `at` is the line that was running.
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


@dataclass(repr=False)
class CommTrace:
    """What one rank sent and received inside `trace_comm`, in order; print it."""

    rank: int
    calls: list[TracedCall] = field(default_factory=list[TracedCall])

    @property
    def received(self) -> int:
        """Bytes from other ranks."""
        return sum(call.received for call in self.calls)

    def to_json(self) -> str:
        """Everything, for programs."""
        return json.dumps({"rank": self.rank, "calls": [asdict(call) for call in self.calls]})

    def __str__(self) -> str:
        last = f"rank {self.rank}: {len(self.calls)} calls, {self.received} bytes received"
        if not self.calls:
            return f"rank {self.rank}: no communication"
        rows = [_HEAD, *(_row(at, call) for at, call in enumerate(self.calls, 1))]
        widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
        return "\n".join([*(_aligned(row, widths) for row in rows), last])

    __repr__ = __str__


@contextmanager
def trace_comm() -> Generator[CommTrace]:
    """The collectives and messages that this rank makes inside, each with the line of the program that needs it.

    Those of a backward pass are told by the line of the forward pass whose gradient needs them, where that line ran
    inside as well. Gradients of parameters are reduced together, when they are first looked at. A compiled program
    shows the line that calls it. Raises NoCarrierError outside of ranks: it goes into the function that is simulated.

    >>> import torch, meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["tp"])
    >>> def program():
    ...     a = mw.shard_tensor(torch.ones(4, 8), mesh, [mw.Shard(1)])
    ...     b = mw.shard_tensor(torch.ones(8, 6), mesh, [mw.Shard(0)])
    ...     with mw.trace_comm() as trace:
    ...         torch.relu(a @ b)
    ...     return trace
    >>> [call] = mw.simulate(program, 2)[0].calls
    >>> call.step, call.axes, call.received, call.stage
    ('AllReduce(tp)', ('tp',), 96, 'forward')
    """
    here = current()
    trace = CommTrace(here.rank)

    def listen(call: Call, received: int) -> None:
        trace.calls.append(_traced(here, call, received, sys._getframe(1)))

    with here.seen.telling(listen), places_kept():
        yield trace


def _traced(here: Carrier, call: Call, received: int, frame: FrameType) -> TracedCall:
    step, axes = _step(here.rank, call, frame)
    at = user_frame(frame)
    stage, line, module = "forward", at, module_path(frame)
    bucket = bucket_of(frame)
    if bucket is not None:
        stage, axes = "gradients", _axes(bucket.mesh, here.rank, call.group)
    elif in_backward():
        place = place_of_gradient(frame)
        stage, line, module = "backward", *(place or (at, module))
    return TracedCall(call.kind, str(call), call.group, axes, step, received, stage, line, module, at)


def _step(rank: int, call: Call, frame: FrameType | None) -> tuple[str, tuple[str, ...]]:
    """The step of the conversion that makes the call, and the axes along which its group lies."""
    while frame is not None and frame.f_code is not Carrier.convert.__code__:
        frame = frame.f_back
    if frame is None:
        return "", ()
    for step, spec in frame.f_locals["way"].walk():
        if set(step.group(spec, rank)) == set(call.group) and len(call.group) > 1:
            return repr(step), _axes(spec.mesh, rank, call.group)
    return "", ()


def _axes(mesh: ProcessMesh, rank: int, group: Sequence[int]) -> tuple[str, ...]:
    """The fewest axes of the mesh along which a group lies; none for one that lies across."""
    if rank not in mesh:
        return ()
    every = (axes for count in range(1, mesh.ndim + 1) for axes in combinations(mesh.dim_names, count))
    return next((axes for axes in every if set(mesh.group(rank, axes)) == set(group)), ())


def _row(at: int, call: TracedCall) -> tuple[str, ...]:
    over = "@".join(call.axes) or f"ranks {', '.join(map(str, call.group))}"
    return (str(at), call.kind, call.step, over, str(call.received), call.stage, _short(call.line), call.module)


def _short(line: str) -> str:
    path, _, number = line.rpartition(":")
    return f"{Path(path).name}:{number}" if path else line


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(_cells(row, widths)).rstrip()


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for name, cell, width in zip(_HEAD, row, widths, strict=True):
        yield cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
