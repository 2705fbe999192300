"""The functions of torch.distributed that take a tensor, each called on a distributed tensor in a group of one process.

The functions are found by walking the modules. Their arguments are chosen by the names and the types of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from benchmarks._escape_ways import Lay, Way, plainly, value


@contextmanager
def one_process_group() -> Generator[None]:
    """Create a default process group of this process alone, for the duration of the context."""
    if dist.is_initialized():
        yield
        return
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


_SINGLE = ("tensor", "input", "self", "input_tensor", "output_tensor", "output", "my_tensor", "inp")
_LISTS = (
    "tensor_list",
    "tensors",
    "input_list",
    "input_tensor_list",
    "output_tensor_list",
    "scatter_list",
    "inputs",
    "gather_list",
    "input_tensors",
    "output_tensors",
    "input_tensor_lists",
    "output_tensor_lists",
)
_OBJECTS = ("obj", "object_list", "object_gather_list", "scatter_object_input_list", "scatter_object_output_list")
_GIVEN: dict[str, Callable[[], Any]] = {"group": lambda: dist.group.WORLD, "src": lambda: 0, "dst": lambda: 0}
"""Parameters that are passed even if they have a default."""
_OTHERS: dict[str, Any] = {
    "world_size": 1, "scatter_dim": 0, "gather_dim": 0, "reduceOp": "sum", "reduce_op": "sum", "split_dim": 0,
    "output_split_sizes": None, "input_split_sizes": None, "backend": "gloo",
}  # fmt: skip


def _arguments(function: Callable[..., Any], lay: Lay) -> dict[str, Any] | None:
    """Return arguments by name for the parameters of a function; None if the function takes no tensor."""
    found: dict[str, Any] = {}
    any_tensor = False
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _SINGLE or name in _LISTS or name in _OBJECTS:
            any_tensor = True
            found[name] = _tensors(name, lay)
        elif name in _GIVEN:
            found[name] = _GIVEN[name]()
        elif name in ("op", "p2p_op_list"):
            continue
        elif parameter.default is inspect.Parameter.empty and parameter.kind.name.startswith("POSITIONAL"):
            number = _OTHERS.get(name, 0)
            found[name] = [number] if "ist[" in str(parameter.annotation) else number
    return found if any_tensor else None


def _tensors(name: str, lay: Lay) -> Any:
    if name in _SINGLE:
        return lay(value())
    if name == "obj":
        return {"x": lay(value())}
    if name == "output_tensor_lists":
        return [[lay(value())]]
    return [lay(value())]


_BLOCKING = ("send", "recv")
"""Parts of names of functions that wait for another process, and are not called in a group of one process."""


def _called(function: Callable[..., Any], lay: Lay) -> Any:
    if lay is plainly and any(part in function.__name__ for part in _BLOCKING):
        raise RuntimeError("a message to the process itself")
    given = _arguments(function, lay) or {}
    out = function(**given)
    out = out.wait() if isinstance(out, dist.Work) else out
    kept = {name: v for name, v in given.items() if name != "group"}
    return (None if isinstance(out, bool) else out), kept


def collectives() -> Iterator[Way]:
    """Yield every function of `torch.distributed` that takes a tensor, and every functional or differentiable one."""
    for module in (dist, functional, differentiable):
        for name, function in sorted(vars(module).items()):
            public = inspect.isfunction(function) and not name.startswith("_") and not name.endswith("_context")
            if public and function.__module__.startswith("torch.distributed") and _takes_tensors(function):
                title = f"{module.__name__}.{name}"
                yield Way("collective", title, lambda lay, f=function: _called(f, lay))
    for name, call in BESIDE.items():
        yield Way("collective", name, call)


def _takes_tensors(function: Callable[..., Any]) -> bool:
    try:
        return _arguments(function, lambda x: x) is not None
    except (TypeError, ValueError):
        return False


def _reduced(lay: Lay) -> Any:
    x = lay(value())
    dist.group.WORLD.allreduce(x).wait()
    return x


def _sent(lay: Lay) -> Any:
    if lay is plainly:
        raise RuntimeError("a message to the process itself")
    return [op.wait() for op in dist.batch_isend_irecv([dist.P2POp(dist.isend, lay(value()), 0)])]


def _waited(lay: Lay) -> Any:
    x = lay(value())
    dist.all_reduce(x, async_op=True).wait()
    return x


def _coalesced(lay: Lay) -> Any:
    x, y = lay(value()), lay(value() + 1)
    dist.all_reduce_coalesced([x, y])
    return x, y


def _linear(lay: Lay) -> nn.Module:
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(lay(value()))
    return model


def _replicated(lay: Lay) -> Any:
    model = nn.parallel.DistributedDataParallel(_linear(lay))
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad


def _broadcast(lay: Lay) -> Any:
    x = lay(value())
    dist._broadcast_coalesced(dist.group.WORLD, [x], 1024, 0)
    return x


def _fully_sharded(lay: Lay) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = _linear(lay)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return model(torch.ones(1, 2))


def _as_dtensor(lay: Lay, make: Callable[[Any, Any, Any], Any]) -> Any:
    from torch.distributed.tensor import Replicate

    return (make(lay(value()), dist.init_device_mesh("cpu", (1,)), [Replicate()]) + 1).full_tensor()


def _from_local(x: Tensor, mesh: Any, placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, placements)


def _distributed(x: Tensor, mesh: Any, placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, mesh, placements)


BESIDE: dict[str, Callable[[Lay], Any]] = {
    "ProcessGroup.allreduce": _reduced,
    "torch.distributed.batch_isend_irecv": _sent,
    "torch.distributed.all_reduce(async_op=True)": _waited,
    "torch.distributed.all_reduce_coalesced of two": _coalesced,
    "torch.distributed._broadcast_coalesced": _broadcast,
    "DistributedDataParallel(model)": _replicated,
    "fully_shard(model)": _fully_sharded,
    "DTensor.from_local(x)": lambda lay: _as_dtensor(lay, _from_local),
    "distribute_tensor(x)": lambda lay: _as_dtensor(lay, _distributed),
}
"""Calls of classes, and calls whose arguments cannot be found from signatures."""
