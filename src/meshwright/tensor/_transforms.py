"""Inside `vmap`, `grad`, `jvp` and what else `torch.func` makes of them, distributed tensors are whole and plain.

A transform's tensors are torch's own wrappers, of which no part can be sent to another rank. So what comes in, and
what a transformed function uses beside, is gathered outside of all transforms; what comes out is plain, the same on
each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._dispatch import planned
from ._dist_tensor import DistTensor, signature
from ._errors import OperationError, TraceError
from ._local import whole_local, whole_spec
from ._registry import DIRECT
from ._stage_order import name_of
from ._tree import map_tensors, tensors_in
from ._whole import tell_whole
from ._writes import version_of
from .torch_hooks import (
    call_plain,
    graph_tracing,
    jit_tracing,
    offer_call,
    tell_scripts,
    tell_transforms,
    transforming,
    transforms_paused,
)

NAME = "torch.func"
WHY = "its transforms see plain tensors"


def _observed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(*args, **kwargs)`, called inside a transform, a dispatch mode or a trace."""
    if func in DIRECT and transforming():
        return call_plain(func, types, args, kwargs or {})
    if func not in DIRECT:
        _check_traced(func, args, kwargs)
    if transforming():
        return _inside(func, args, kwargs or {})
    return planned(func, types, args, kwargs, signature(func, args, kwargs))


def _inside(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(*args, **kwargs)`, called inside a transform, on whole, plain tensors."""
    wholes = _Wholes((args, kwargs))
    args, kwargs = map_tensors(wholes.plain, (args, kwargs))
    out = func(*args, **kwargs)
    wholes.check(func)
    return out


def _check_traced(func: Any, args: Any, kwargs: Any) -> None:
    """Raise TraceError inside a trace, which would record the local part of one rank."""
    tracer = "torch.jit.trace" if jit_tracing() else "make_fx" if graph_tracing() else None
    if tracer is None:
        return
    specs = ", ".join(repr(t._spec) for t in tensors_in((args, kwargs or {})) if isinstance(t, DistTensor))
    raise TraceError(
        f"{name_of(func)} inside {tracer}", specs,
        "the trace would hold the local part and the local sizes of one rank",
        "trace the plain model and shard it afterwards, use torch.export.export, or use mw.to_static for a step",
    )  # fmt: skip


def _entering(x: Any) -> Any:
    """A tensor as a transform takes it in."""
    return _Wholes(x).plain(x) if isinstance(x, DistTensor) else x


def _check_functional(x: Any) -> None:
    """Raise OperationError for a distributed argument of `torch.func.functionalize`."""
    if isinstance(x, DistTensor):
        raise OperationError(
            f"{NAME}.functionalize of a distributed tensor", repr(x._spec),
            "it writes into the memory of its arguments, and the argument is a gathered copy of the tensor",
            "call the function without functionalize; the results are the same",
        )  # fmt: skip


def _check_scripted(module: Any) -> None:
    """Raise TraceError for a module with distributed parameters or buffers, before it becomes TorchScript."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(x, DistTensor):
            raise TraceError(
                f"torch.jit.script of {type(module).__name__}", f"{name}: {x._spec!r}",
                "TorchScript runs in C++, which sees the local part only",
                "call the module without torch.jit.script, or use torch.compile or mw.to_static",
            )  # fmt: skip


def _scripted(own: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a TorchScript function on whole tensors; its C++ code would see local parts only."""
    script, *rest = args
    if not any(isinstance(t, DistTensor) for t in tensors_in((rest, kwargs))):
        return NotImplemented
    return DistTensor.__torch_function__(script, (DistTensor,), tuple(rest), kwargs)


class _Wholes:
    """Distributed tensors of a tree beside their whole values, which take part in autograd."""

    def __init__(self, tree: Any) -> None:
        with transforms_paused():
            found = {id(t): t for t in tensors_in(tree) if isinstance(t, DistTensor)}
            self.pairs = {key: (t, whole_local(t)) for key, t in found.items()}
            self.versions = {key: version_of(w) for key, (_, w) in self.pairs.items()}
        tell_whole(NAME, WHY)

    def plain(self, t: Tensor) -> Tensor:
        return self.pairs[id(t)][1] if id(t) in self.pairs else t

    def check(self, func: Any) -> None:
        """Raises OperationError where the call wrote into a tensor whose parts lie elsewhere."""
        for key, (t, whole) in self.pairs.items():
            if version_of(whole) != self.versions[key] and whole_spec(t._spec) is not t._spec:
                raise OperationError(
                    f"to write with {getattr(func, '__name__', func)} inside a transform of {NAME}", repr(t._spec),
                    "there the tensor is a whole copy, and what is written to it is lost",
                    "the new value as a result of the transformed function, written outside",
                )  # fmt: skip


DistTensor._observed = staticmethod(_observed)
tell_transforms(_entering, _check_functional)
tell_scripts(_check_scripted)
offer_call(torch.jit.ScriptFunction, "__call__", _scripted)
