"""Functions of torch.distributed that are called on distributed tensors.

A distributed tensor stands for its whole value, so one device would make such a call in a group of one process.
`broadcast`, and any collective in a group of one process, act on the whole value. In larger groups, `all_reduce` and
`all_gather` would count the value once for each process, and `scatter` and `recv` would give each rank another result.
These calls raise CollectiveError.

All these functions call operators of the namespace c10d, and the operators are guarded. Functions that call
`__torch_function__` first are called on whole values, and the guard sees the tensors that they write to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import TorchValue

from .._errors import CollectiveError
from .._torch_call import TorchFunction
from ..conversion.local_parts import write_into
from ..conversion.python_values import gather_everywhere
from ..core.dist_tensor import DistTensor
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import Operator, no_interception, offer_call
from .torch_hooks import collective_operators, constructors_of_distributed, group_of, guard_operator, work_of

ALIKE = frozenset({
    "allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
})  # fmt: skip
"""Operators after which every rank of the group holds the same results."""
SENT = frozenset({"send"})
"""Operators that write to none of their tensors.

Others write to every tensor whose name does not begin with `input`.
"""
_FIX = (
    "use x itself, which needs no collective; or pass mw.unshard_dtensor(x), the whole value as a plain tensor; "
    "or pass x.to_local(), this rank's part. With Accelerate or transformers' Trainer, call "
    "os.environ.update(LOCAL_RANK='-1', WORLD_SIZE='1') after mw.init_process()"
)


class _Standing(threading.local):
    """Whole values that replace distributed tensors in a call of torch.distributed: id → (whole value, tensor)."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, DistTensor]] = {}


_standing = _Standing()


def handler_of(func: TorchFunction) -> Callable[..., TorchValue] | None:
    """Return the handler of a torch.distributed function that calls `__torch_function__`; None for other functions."""
    module = getattr(func, "__module__", None) or ""
    if module == dist.all_reduce.__module__:
        return _call_on_wholes
    is_collective = module.startswith("torch.distributed.") or "c10d_functional" in str(func)
    return _refuse if is_collective else None


def _call_on_wholes(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Call the function on whole values; the guard of its operator writes the results into the parts."""
    tensors = {id(t): t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)}
    wholes = {key: gather_everywhere(t).detach().clone() for key, t in tensors.items()}
    before, _standing.known = _standing.known, {id(w): (w, tensors[key]) for key, w in wholes.items()}
    try:
        args, kwargs = map_tensors(lambda t: wholes.get(id(t), t), (args, kwargs))
        return func(*args, **kwargs)
    finally:
        _standing.known = before


def _refuse(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    given = [t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)]
    name = getattr(func, "__name__", str(func))
    raise _refusal(name, given, "its result is a plain tensor that may differ between ranks")


def _guard(op: Operator, args: tuple[TorchValue, ...], run: Callable[..., TorchValue]) -> TorchValue:
    """Run the collective on whole values, and write its results into the parts."""
    given = [x for _, x in _distributed_among(tensors_in(args))]
    if not given:
        return run(*args)
    name = op._schema.name.partition("::")[2]
    written = dict(_distributed_among(_written_tensors(op, args)))
    _check_collective(name, args, given, bool(written))
    wholes = {id(t): _whole(t, id(t) in written) for t in tensors_in(args) if isinstance(t, DistTensor)}
    with no_interception(), torch.no_grad():
        out = run(*map_tensors(lambda t: wholes.get(id(t), t), args))
        if written:
            _wait_for_results(name, out, given)
    with torch.no_grad():
        for key, x in written.items():
            write_into(x, wholes[key] if key in wholes else _standing.known[key][0])
    return out


def _distributed_among(tensors: Iterable[Tensor]) -> Iterator[tuple[int, DistTensor]]:
    """Yield the id of each argument that is a distributed tensor or stands for one, and the distributed tensor."""
    for t in tensors:
        if isinstance(t, DistTensor):
            yield id(t), t
        elif id(t) in _standing.known:
            yield id(t), _standing.known[id(t)][1]


def _whole(x: DistTensor, written: bool) -> Tensor:
    return gather_everywhere(x).clone() if written else gather_everywhere(x)


def _written_tensors(op: Operator, args: tuple[TorchValue, ...]) -> Iterator[Tensor]:
    """Yield the tensors that the operator writes to; its schema does not mark them."""
    if op._schema.name.partition("::")[2] in SENT:
        return
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if not argument.name.startswith("input"):
            yield from tensors_in(value)


def _check_collective(name: str, args: tuple[TorchValue, ...], given: list[DistTensor], writes: bool) -> None:
    """Raise CollectiveError unless every rank of the tensors' meshes gets the results of one device."""
    here = current_communicator()
    group = next((ranks for ranks in map(_ranks_of_group, args) if ranks is not None), ())
    if name in SENT or (writes and name not in ALIKE):
        raise _refusal(name, given, "its result differs between ranks, or not every rank makes the call")
    if len(group) == 1 and (here.kind == "simulated" or here.size == 1):
        return  # every simulated rank makes the call by itself, and its process is the whole group
    missing = sorted(set(range(here.size)) - set(group))
    if missing:
        raise _refusal(name, given, f"ranks {missing} hold parts and are not in the group")
    if name != "broadcast_":
        raise _refusal(
            name, given, f"x is already the value of all ranks, and the result would count it {len(group)} times"
        )


def _ranks_of_group(argument: TorchValue) -> tuple[int, ...] | None:
    """Return the global ranks of a process group; None for another argument."""
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return tuple(dist.get_process_group_ranks(group_of(argument)))
    except (RuntimeError, TypeError, KeyError, ValueError):  # a reduction, or a group that was destroyed
        return None


def _wait_for_results(name: str, out: TorchValue, given: list[DistTensor]) -> None:
    """Wait for the collective, because its results are written into parts next."""
    boxed = out[-1] if isinstance(out, tuple) else out
    work = None if boxed is None else work_of(boxed)
    if work is None:
        raise _refusal(name, given, "a coalescing manager does not report when the result of the call is complete")
    work.wait()


def _refusal(name: str, given: list[DistTensor], why: str) -> CollectiveError:
    specs = ", ".join(f"{t._spec!r} on {t._spec.mesh!r}" for t in given)
    return CollectiveError(f"{name} of torch.distributed", specs, why, _FIX)


def _reduced_elsewhere(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Raise CollectiveError for DistributedDataParallel or a DTensor of distributed tensors.

    DistributedDataParallel reads memory in C++, and a DTensor takes that memory for its own part.
    """
    given = [t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor)]
    if not given:
        return NotImplemented
    raise CollectiveError(
        f"{own.__name__} of torch.distributed",
        ", ".join(repr(t._spec) for t in given[:4]),
        "it would use the memory of this rank's parts as whole tensors",
        "leave out DistributedDataParallel and fully_shard, since gradients of distributed parameters are reduced "
        "already; call mw.to_torch_dtensor(x) for a DTensor",
    )


def _new_dtensor(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Raise CollectiveError for a DTensor of a distributed tensor; every result of DTensor pays for this check."""
    is_plain = len(args) > 1 and not isinstance(args[1], DistTensor)  # (class, local tensor, …)
    return NotImplemented if is_plain else _reduced_elsewhere(own, args, kwargs)


if dist.is_available():
    for _op in collective_operators():
        guard_operator(_op, _guard)
    for _owner, _name in constructors_of_distributed():
        offer_call(_owner, _name, _new_dtensor if _name.endswith("__new__") else _reduced_elsewhere)
