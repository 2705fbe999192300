"""`torch.compile` around distributed tensors: a function that uses one runs as plain Python.

A distributed tensor answers with its global shape and computes with its local part, so a graph traced from it would
hold the sizes and the addresses of one rank. TorchDynamo asks every tensor that it meets for its static address, and
nothing else does. A distributed tensor answers with `SkipFrame`, which makes TorchDynamo run the function that it was
tracing, now and in later calls, without compiling it. Functions that this one calls are still compiled if they only
use plain tensors.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

from ._dist_tensor import DistTensor
from ._errors import CompileError
from .torch_hooks import SkipFrame, compile_trace, leave_untraced

_NAME = "_dynamo_static_input_type"
"""The attribute that TorchDynamo reads, and that `mark_static_address` sets, as users may, too."""


class _StaticAddress:
    """The attribute of a distributed tensor by which TorchDynamo finds that it must not trace the tensor."""

    def __get__(self, x: DistTensor | None, owner: type) -> Any:
        if x is None:
            return self
        _leave(x)
        if _NAME not in vars(x):
            raise AttributeError(_NAME)
        return vars(x)[_NAME]

    def __set__(self, x: DistTensor, value: Any) -> None:
        _leave(x)
        vars(x)[_NAME] = value


def _leave(x: DistTensor) -> None:
    """Stop the trace that `torch.compile` is making in this thread, if any.

    Raises CompileError if the trace must become one graph.
    """
    trace = compile_trace()
    if trace is None:
        return
    if trace.one_graph or getattr(trace, "error_on_graph_break", False):
        code = trace.f_code
        raise CompileError(
            f"one graph of {code.co_name}, {code.co_filename}:{code.co_firstlineno}", repr(x._spec),
            "a graph would hold the local sizes of one rank, so functions with distributed tensors are not compiled",
            "fix: torch.compile without fullgraph=True, which runs the function uncompiled, or mw.to_static for a step",
        )  # fmt: skip
    raise SkipFrame(f"uses a distributed tensor, {x._spec!r}")


setattr(DistTensor, _NAME, _StaticAddress())
for _package in pkgutil.iter_modules([str(Path(__file__).parents[1])]):
    if _package.name != "models":  # models are what users compile
        leave_untraced(f"{__name__.partition('.')[0]}.{_package.name}")
