"""Trace the collectives of a program in order, with the lines that need them, and the work of the rank meanwhile."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import FrameType

from meshwright.checkpoint import current_world
from meshwright.comm import CommCall, Communicator, StreamWork, current_communicator
from meshwright.layout import ProcessMesh, module_path, user_frame, write_whole
from meshwright.reshard import ConversionPlan, Purpose
from meshwright.search import text_table
from meshwright.tensor import bucket_of, call_site_of_gradient, call_sites_kept, in_backward

from .trace_file import rank_events, trace_file
from .traced_call import TracedCall
from .traced_work import TracedWork, WorkRecorder, clock

_HEAD = ("", "call", "by", "over", "bytes", "pass", "line", "module")
_NUMBERS = {_HEAD.index(""), _HEAD.index("bytes")}


@dataclass(repr=False)
class CommTrace:
    """The communication of one rank inside `trace_comm`, in order, and its work; print it, or save it."""

    rank: int
    calls: list[TracedCall] = field(default_factory=list[TracedCall])
    works: list[TracedWork] = field(default_factory=list[TracedWork])
    streams: list[StreamWork] = field(default_factory=list[StreamWork])
    """The work on communication streams, by the device's clock; its starts are seconds since 1970."""

    @property
    def received(self) -> int:
        """Return the bytes received from other ranks."""
        return sum(call.received for call in self.calls)

    def to_json(self) -> str:
        """Return everything as JSON."""
        found = {"calls": self.calls, "works": self.works, "streams": self.streams}
        return json.dumps({"rank": self.rank} | {name: list(map(asdict, each)) for name, each in found.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the traces of all ranks into one file for ui.perfetto.dev or Chrome's tracing page.

        Every rank makes the call, after the block. The file appears complete or not at all; rank 0 writes it.
        """
        events = current_world().gathered(list(rank_events(self.rank, self.calls, self.works, self.streams)))
        if self.rank == 0:
            write_whole(path, trace_file(events).encode())

    def __str__(self) -> str:
        last = f"rank {self.rank}: {len(self.calls)} calls, {self.received} bytes received"
        if not self.calls:
            return f"rank {self.rank}: no communication"
        rows = [_HEAD, *(_row(at, call) for at, call in enumerate(self.calls, 1))]
        return "\n".join([*text_table(rows, _NUMBERS), last])

    __repr__ = __str__


@contextmanager
def trace_comm() -> Generator[CommTrace]:
    """Record the collectives and messages of this rank inside the block, each with the program line that needs it.

    Communication of a backward pass has the line of the forward pass whose gradient needs it, if that line ran inside
    the block as well. Gradients of parameters are reduced together, when they are first read. A program by Inductor has
    the line that calls it. For `save`, calls have times, and the work around them is recorded: forward and backward
    passes of modules, updates, programs, and a pipeline's actions.

    Raises:
        NoCommunicatorError: there are no ranks; put the block inside the function that is simulated.

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
    here = current_communicator()
    trace = CommTrace(here.rank)

    own, works = threading.get_ident(), WorkRecorder(here.seen, trace.works)

    def listen(call: CommCall, received: int) -> Callable[[], None]:
        at, began = len(trace.calls), clock()
        told = _traced(here, call, received, sys._getframe(1))
        trace.calls.append(replace(told, began=began, aside=threading.get_ident() != own))

        def ended() -> None:
            trace.calls[at] = replace(trace.calls[at], seconds=clock() - began)

        return ended

    with here.timing_streams() as times:
        since = clock()
        with here.seen.telling(listen, works.watch), call_sites_kept(), works.of_modules():
            yield trace
        found = [] if times is None else times.works()
    trace.streams += [replace(work, began=since + work.began) for work in found]


def _traced(here: Communicator, call: CommCall, received: int, frame: FrameType) -> TracedCall:
    step, axes, purpose = _step(here.rank, call, frame)
    at = user_frame(frame)
    stage, line, module = purpose or ("forward", at, module_path(frame))
    line = line or at
    bucket = bucket_of(frame)
    if bucket is not None:
        stage, axes = "gradients", _axes(bucket.mesh, here.rank, call.group)
    elif purpose is None and in_backward():
        place = call_site_of_gradient(frame)
        stage, line, module = "backward", *(place or (at, module))
    peer = call.message[0] if call.kind in ("send", "receive") else None
    told = (call.kind, str(call), call.group, axes, step, received, stage, line, module, at)
    return TracedCall(*told, peer=peer, tag=call.tag)


def _step(rank: int, call: CommCall, frame: FrameType | None) -> tuple[str, tuple[str, ...], Purpose | None]:
    """Return the conversion's step that makes the call, the axes of its group, and the conversion's purpose."""
    plan = _running_plan(frame)
    if plan is None:
        return "", (), None
    for step, spec in plan.walk():
        if set(step.group(spec, rank)) == set(call.group) and len(call.group) > 1:
            return repr(step), _axes(spec.mesh, rank, call.group), plan.purpose
    return "", (), plan.purpose


def _running_plan(frame: FrameType | None) -> ConversionPlan | None:
    """Return the plan that the nearest frame with a plan is carrying out."""
    while frame is not None:
        for held in frame.f_locals.values():
            if isinstance(held, ConversionPlan):
                return held
        frame = frame.f_back
    return None


def _axes(mesh: ProcessMesh, rank: int, group: Sequence[int]) -> tuple[str, ...]:
    """Return the fewest axes of the mesh that span the group; () if no axes do."""
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
