"""Backend `mesh` of torch.distributed for processes: it copies to the host and back around the calls of Gloo.

It has the calls that `meshwright.comm` makes. They run on the current stream. A call that receives is complete when it
returns; a send and a barrier end in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d


class _Done:
    """A call that is complete."""

    def wait(self) -> bool:
        return True


class StagedBackend:
    """Gloo between copies of tensors on the CPU."""

    supports_coalescing = False

    def __init__(self, store: Any, place: int, size: int, limit: timedelta) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        self._gloo = c10d.ProcessGroupGloo(store, place, size, options)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        return self._staged([], tensors, lambda _, outs: self._gloo.allreduce(outs, options))

    def _allgather_base(self, out: Tensor, x: Tensor, options: Any) -> _Done:
        return self._staged([x], [out], lambda ins, outs: self._gloo._allgather_base(outs[0], ins[0], options))

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: Any) -> _Done:
        return self._staged([x], [out], lambda ins, outs: self._gloo._reduce_scatter_base(outs[0], ins[0], options))

    def alltoall_base(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int], options: Any) -> _Done:
        def call(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(outs[0], ins[0], arriving, leaving, options)

        return self._staged([x], [out], call)

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Done:
        return self._staged([], tensors, lambda _, outs: self._gloo.broadcast(outs, options))

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Any:
        return self._gloo.send([x.cpu() for x in tensors], place, tag)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> _Done:
        return self._staged([], tensors, lambda _, outs: self._gloo.recv(outs, place, tag))

    def barrier(self, options: Any) -> Any:
        return self._gloo.barrier(options)

    def _staged(
        self, sends: list[Tensor], receives: list[Tensor], call: Callable[[list[Tensor], list[Tensor]], Any]
    ) -> _Done:
        outs = [x.cpu() for x in receives]
        call([x.cpu() for x in sends], outs).wait()
        for target, values in zip(receives, outs, strict=True):
            target.copy_(values)
        return _Done()


def register_backend() -> None:
    """Make the name `mesh` known to `torch.distributed`, and so to `meshwright.init_process`."""
    if "MESH" not in dist.Backend._plugins:
        dist.Backend.register_backend("mesh", StagedBackend, devices=["mesh"])
