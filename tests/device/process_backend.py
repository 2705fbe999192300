"""Backend `mesh` of torch.distributed for processes: calls are queued on the current stream, in virtual time.

It has the calls that `meshwright.comm` makes. Each call copies its operands to the host, uses Gloo there, and copies
the results back. A thread runs the queued calls, as a device does: the host waits for none of them. A collective starts
when the last process is ready, and ends `latency + bytes / bandwidth` later (`transport.py`).
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from meshwright import Platform, register_platform

from .backend import NAME, register

LATENCY, BANDWIDTH = 1e-5, 1e11
Call = Callable[[list[Tensor], list[Tensor]], Any]
"""A call of Gloo with operands and results on the host; returns its work."""


class _Queued:
    """A call that is queued on its stream, behind which the stream's next work comes."""

    def wait(self) -> bool:
        return True


class QueuedBackend:
    """Gloo between copies of tensors on the CPU, by calls that are queued on the current stream."""

    supports_coalescing = False

    def __init__(self, store: Any, place: int, size: int, limit: timedelta) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        self._gloo = c10d.ProcessGroupGloo(store, place, size, options)
        self._size = size
        self._core: Any = register()
        self._queue = _DeviceQueue(self._core)
        self._leaving: list[Any] = []
        """Messages that may not have left yet."""
        atexit.register(self._send_all)

    def _send_all(self) -> None:
        """Wait until all messages have left: the process that receives them may need them after the end of this one."""
        self._queue.finish()
        for work in self._leaving:
            work.wait()

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Queued:
        (x,) = tensors
        nbytes = -(-2 * (self._size - 1) * x.nbytes // self._size)
        return self._collective("all_reduce", [x], [x], nbytes, lambda _, outs: self._gloo.allreduce(outs, options))

    def _allgather_base(self, out: Tensor, x: Tensor, options: Any) -> _Queued:
        def call(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo._allgather_base(outs[0], ins[0], options)

        return self._collective("all_gather", [x], [out], out.nbytes - x.nbytes, call)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: Any) -> _Queued:
        def call(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo._reduce_scatter_base(outs[0], ins[0], options)

        return self._collective("reduce_scatter", [x], [out], x.nbytes - out.nbytes, call)

    def alltoall_base(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int], options: Any) -> _Queued:
        def call(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(outs[0], ins[0], arriving, leaving, options)

        return self._collective("all_to_all", [x], [out], out.nbytes, call)

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Queued:
        (x,) = tensors
        return self._collective("broadcast", [x], [x], x.nbytes, lambda _, outs: self._gloo.broadcast(outs, options))

    def send(self, tensors: list[Tensor], place: int, tag: int) -> _Queued:
        (x,) = tensors
        nbytes = x.nbytes

        def run(ins: list[Tensor], outs: list[Tensor], start: float) -> float:
            arrives = _time(start + LATENCY + nbytes / BANDWIDTH)
            self._leaving += [self._gloo.send([each], place, 2 * tag + at) for at, each in enumerate((*ins, arrives))]
            return start + nbytes / BANDWIDTH

        return self._queued("message", [x], [], run)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> _Queued:
        def run(ins: list[Tensor], outs: list[Tensor], start: float) -> float:
            arrives = _time(0)
            for at, each in enumerate((*outs, arrives)):
                self._gloo.recv([each], place, 2 * tag + at).wait()
            return max(start, arrives.item())

        return self._queued("message", [], tensors, run)

    def barrier(self, options: Any) -> Any:
        return self._gloo.barrier(options)

    def _collective(
        self, name: str, sends: Sequence[Tensor], receives: Sequence[Tensor], nbytes: int, call: Call
    ) -> _Queued:
        """Queue a collective in which this rank receives `nbytes`."""

        def run(ins: list[Tensor], outs: list[Tensor], start: float) -> float:
            latest = c10d.AllreduceOptions()
            latest.reduceOp = dist.ReduceOp.MAX
            begin = torch.tensor([start, nbytes], dtype=torch.float64, device="cpu")
            self._gloo.allreduce([begin], latest).wait()
            call(ins, outs).wait()
            started, most = begin.tolist()
            return started + LATENCY + most / BANDWIDTH

        return self._queued(name, sends, receives, run)

    def _queued(
        self,
        name: str,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        run: Callable[[list[Tensor], list[Tensor], float], float],
    ) -> _Queued:
        core = self._core
        reads, writes = [core.Operand(x) for x in sends], [core.Operand(x) for x in receives]
        in_place = [*map(id, sends)] == [*map(id, receives)]

        def timed(start: float) -> float:
            ins = [x.read() for x in reads]
            outs = ins if in_place else [x.read() for x in writes]
            end = run(ins, outs, start)
            for operand, values in zip(writes, outs, strict=True):
                operand.write(values)
            return end

        self._queue.launch(name, reads, writes, timed)
        return _Queued()


class _DeviceQueue:
    """A thread that runs what is queued on streams; the host's thread raises its errors."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._ahead: SimpleQueue[tuple[torch.Stream, int] | threading.Event] = SimpleQueue()
        self._errors: list[Exception] = []
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, name: str, reads: Sequence[Any], writes: Sequence[Any], run: Callable[[float], float]) -> None:
        if self._errors:
            raise self._errors.pop()
        stream = torch.accelerator.current_stream()
        self._core.launch(stream, name, reads, writes, run)
        self._ahead.put((stream, self._core.position(stream)))

    def finish(self) -> None:
        """Wait until all that is queued has run, at most ten seconds."""
        done = threading.Event()
        self._ahead.put(done)
        done.wait(10)

    def _run(self) -> None:
        while True:
            following = self._ahead.get()
            if isinstance(following, threading.Event):
                following.set()
                continue
            try:
                self._core.run_to(*following)
            except Exception as error:
                self._errors.append(error)


class QueuedSignal:
    """A number for which streams wait by queued work."""

    def __init__(self, device: torch.device) -> None:
        self._core: Any = register()
        self._number = 0
        self._changed = threading.Condition()

    def wait(self, stream: torch.Stream, number: int) -> None:
        def run(start: float) -> float:
            with self._changed:
                self._changed.wait_for(lambda: self._number >= number)
            return start

        self._core.launch(stream, "wait for the host", [], [], run)

    def reach(self, number: int) -> None:
        with self._changed:
            self._number = number
            self._changed.notify_all()


def _time(seconds: float) -> Tensor:
    return torch.tensor(seconds, dtype=torch.float64, device="cpu")


def register_backend() -> None:
    """Make the name `mesh` known to `torch.distributed`, and so to `meshwright.init_process`."""
    register_platform(Platform(NAME, signal=QueuedSignal))
    if "MESH" not in dist.Backend._plugins:
        dist.Backend.register_backend("mesh", QueuedBackend, devices=["mesh"])
