"""Every private torch name that this package uses, and why there is no public one.

| name | why |
|---|---|
| `torch._C._distributed_c10d` | the backends without `torch.distributed`'s process-wide state: `new_group` must be called by the whole world, or names groups by a count that differs between ranks |
| `Store`, `PrefixStore`, `TCPStore` of it | public in `torch.distributed`, but not exported to type checkers |
| `ProcessGroupGloo._Options`, `._devices`, `._timeout` | Gloo on the loopback interface only |
| `Backend._allgather_base`, `_reduce_scatter_base` | the one-tensor forms of all-gather and reduce-scatter |
| `Backend._start_coalescing`, `_end_coalescing` | NCCL, for example, posts several messages at once only inside these |
| `Backend._plugins` | the creators of backends that others registered |
| `distributed_c10d._get_default_store` | the store of a program that has called `init_process_group` itself |
| `autograd.profiler._prepare_profiler`, `._enable_profiler`, `._disable_profiler` | a process has one profiler, and two threads that use it crash the process |
| `graph._allow_mutation_on_saved_tensors_enabled` | torch keeps it once per process, and each simulated rank enters the context |
| `forward_ad._current_level`, `eager_transforms.JVP_NESTING` | torch keeps the state of forward mode once per process, and each simulated rank needs a state of its own |
"""  # noqa: E501 - a table's rows are lines

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

# the backends themselves, and stores that type checkers know
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch._functorch import eager_transforms  # holds the nesting of `torch.func.jvp`
from torch.autograd import forward_ad, graph, profiler
from torch.distributed import distributed_c10d
from torch.nn.modules import module

from meshwright.layout import PlacedMessage, TorchValue

from ._errors import CallError

__all__ = [
    "EXPORTER",
    "GLOBAL_HOOKS",
    "PROFILER",
    "PROFILER_STARTS",
    "PROFILER_STOP",
    "Backend",
    "ForwardState",
    "PrefixStore",
    "Store",
    "TCPStore",
    "another_connection",
    "default_store",
    "forward_ad",
    "open_backend",
    "saved_mutable",
    "set_saved_mutable",
]


GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = tuple(
    table for name, table in vars(module).items() if name.startswith("_global_") and isinstance(table, dict)
)
"""The tables of hooks that torch calls for all modules of the process; FlopCounterMode adds hooks to them."""

EXPORTER = "torch.export._trace"
"""The module that keeps the state of a running `torch.export` in its globals."""

PROFILER = profiler
"""The module whose functions start and stop torch's profiler, which is one for all threads of a process."""
PROFILER_STARTS = ("_prepare_profiler", "_enable_profiler")
"""Names of the functions that start the profiler."""
PROFILER_STOP = "_disable_profiler"
"""Name of the function that stops the profiler."""


def saved_mutable() -> bool:
    """True inside `torch.autograd.graph.allow_mutation_on_saved_tensors`.

    Torch allows one such context in a process.
    """
    return graph._allow_mutation_on_saved_tensors_enabled


def set_saved_mutable(on: bool) -> None:
    """Set the value that `saved_mutable` returns."""
    graph._allow_mutation_on_saved_tensors_enabled = on


class ForwardState(NamedTuple):
    """State of forward mode that torch keeps once per process: the level, and the nesting of `torch.func.jvp`."""

    level: int
    nesting: int

    @staticmethod
    def now() -> ForwardState:
        """Return the state of the process."""
        return ForwardState(forward_ad._current_level, eager_transforms.JVP_NESTING)

    def set(self) -> None:
        """Make this the state of the process."""
        forward_ad._current_level, eager_transforms.JVP_NESTING = self


class PendingWork(Protocol):
    """A collective in flight."""

    def wait(self) -> bool: ...


class Backend:
    """Transport of one group over a backend of `torch.distributed`."""

    def __init__(self, name: str, raw: TorchValue) -> None:
        self.name = name
        self._raw = raw
        self._coalesces = name != "gloo" and bool(raw.supports_coalescing)
        self._is_connected = False

    def all_reduce(self, out: Tensor, x: Tensor, op: str) -> None:
        """Write the reduction of every rank's `x` to `out`, which is `x` itself or has other memory."""
        if out is not x:
            out.copy_(x)
        options = _on_current_stream(c10d.AllreduceOptions())
        options.reduceOp = _REDUCE_OPS[op]
        self._raw.allreduce([out], options).wait()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write every rank's flat `x` to `out`, one after the other."""
        self._raw._allgather_base(out, x, _on_current_stream(c10d.AllgatherOptions())).wait()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Write the sum over the group of the caller's part of the flat `x` to `out`."""
        self._raw._reduce_scatter_base(out, x, _on_current_stream(c10d.ReduceScatterOptions())).wait()

    def all_to_all(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Write every rank's piece for the caller to `out`, flat, with the given lengths."""
        self._raw.alltoall_base(out, x, arriving, leaving, _on_current_stream(c10d.AllToAllOptions())).wait()

    def broadcast(self, x: Tensor, place: int) -> None:
        """Write the `x` of the rank at this place to every rank's `x`."""
        options = _on_current_stream(c10d.BroadcastOptions())
        options.rootRank = place
        self._raw.broadcast([x], options).wait()

    def exchange(self, sends: Sequence[PlacedMessage], receives: Sequence[PlacedMessage]) -> None:
        """Post all (place in the group, tag, tensor) together, and wait for them."""
        if self._coalesces:
            self._connect()
            if not (sends or receives):
                return  # torch returns no work to wait for
            self._raw._start_coalescing()
        works = [self._raw.send([x], place, tag) for place, tag, x in sends]
        works += [self._raw.recv([x], place, tag) for place, tag, x in receives]
        if self._coalesces:
            works = [self._raw._end_coalescing()]
        for work in cast(list[PendingWork], works):
            work.wait()

    def _connect(self) -> None:
        """Make a collective before the first exchange.

        The first call of a group connects all its members, so a member without messages has to take part (PyTorch
        #74701).
        """
        if not self._is_connected:
            self._is_connected = True
            one = torch.zeros(1, device=torch.accelerator.current_accelerator() or "cpu")
            self.all_reduce(one, one, "sum")

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        self._raw.barrier(c10d.BarrierOptions()).wait()


def _on_current_stream(options: TorchValue) -> TorchValue:
    """Return the options of a call that runs on the current stream.

    Otherwise NCCL runs each group on a stream of its own, which nobody can name.
    """
    options.asyncOp = False
    return options


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def open_backend(name: str, store: Store, place: int, size: int, limit: timedelta, loopback: bool) -> Backend:
    """Return the transport of one group; only its members take part. Raises CallError for an unknown name."""
    if name == "gloo":
        return Backend(name, _gloo(store, place, size, limit, loopback))
    kind: TorchValue = getattr(c10d, f"ProcessGroup{name.upper()}", None)
    if hasattr(kind, "Options"):
        return Backend(name, _on_devices(kind, store, place, size, limit))
    plugin = cast(dict[str, Any], dist.Backend._plugins).get(name.upper())
    if plugin is None:
        raise CallError(
            f"the backend {name!r} of torch.distributed",
            "no backend of that name",
            "this build of torch is without it, or the package that registers it is not imported",
            'install such a build, import the package first, or call mw.init_process(backend="gloo")',
        )
    if plugin.extended_api:
        options: TorchValue = c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size, options.timeout = store, place, size, limit
        return Backend(name, plugin.creator_fn(options, None))
    return Backend(name, plugin.creator_fn(store, place, size, limit))


def backend_for(device_type: str) -> str | None:
    """Return the name of torch's transport for a type of device, also one that was registered from outside."""
    return dist.Backend.default_device_backend_map.get(device_type)


def default_store() -> Store | None:
    """Return the store of a program that has called `torch.distributed.init_process_group` itself; None otherwise."""
    if not dist.is_initialized():
        return None
    return distributed_c10d._get_default_store()


def another_connection(store: Store) -> Store:
    """Return the same store with another connection, for a thread that must not wait for this one.

    The stubs do not know `clone`.
    """
    return cast(Any, store).clone()


def _gloo(store: Store, place: int, size: int, limit: timedelta, loopback: bool) -> TorchValue:
    kind: TorchValue = c10d.ProcessGroupGloo
    if not loopback:
        return kind(store, place, size, limit)
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = limit
    return kind(store, place, size, options)


def _on_devices(kind: TorchValue, store: Store, place: int, size: int, limit: timedelta) -> TorchValue:
    """Return a transport between devices, of one of torch's own classes."""
    options = kind.Options()
    options._timeout = limit
    return kind(store, place, size, options)
