"""Backends of torch: exchanges that coalesce messages as NCCL does, over a record of calls; unknown names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm import CallError
from meshwright.comm.torch_hooks import Backend, open_backend


class Work:
    def wait(self) -> bool:
        return True


class Raw:
    """Record of calls; `_end_coalescing` returns None if nothing was posted, as that of NCCL does."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.posted = 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:
        self.calls.append("allreduce")
        return Work()

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Work:
        self.calls.append("send")
        self.posted += 1
        return Work()

    def _start_coalescing(self) -> None:
        self.posted = 0

    def _end_coalescing(self) -> Work | None:
        return Work() if self.posted else None


def test_a_member_without_messages_takes_part_in_the_first_exchange_and_waits_for_nothing() -> None:
    raw = Raw()
    backend = Backend("nccl", raw)
    backend.exchange([], [])
    backend.exchange([], [])
    assert raw.calls == ["allreduce"]


def test_members_connect_once_before_their_messages() -> None:
    raw = Raw()
    backend = Backend("nccl", raw)
    for _ in range(2):
        backend.exchange([(1, 0, torch.zeros(2))], [])
    assert raw.calls == ["allreduce", "send", "send"]


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(CallError, match="'no such backend'"):
        open_backend("no such backend", torch.distributed.HashStore(), 0, 1, timedelta(seconds=1), loopback=True)
