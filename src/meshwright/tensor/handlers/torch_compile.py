"""`torch.compile` around distributed tensors: a function that uses one runs as plain Python.

A distributed tensor reports its global shape and computes with its local part, so a traced graph would hold the sizes
and the addresses of one rank. TorchDynamo, and nothing else, asks every tensor that it meets for its static address. A
distributed tensor then raises `SkipFrame`. TorchDynamo runs the function that it was tracing without compiling it, in
this call and in later ones. Functions called from there are still compiled if they only use plain tensors.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from meshwright.layout import TorchValue

from .._errors import CompileError
from ..core.dist_tensor import DistTensor
from .torch_hooks import SkipFrame, compile_trace, leave_untraced, run_uncompiled

_NAME = "_dynamo_static_input_type"
"""The attribute that TorchDynamo reads; `mark_static_address` sets it, and users may set it too."""


class _StaticAddress:
    """The attribute of a distributed tensor that stops TorchDynamo from tracing the tensor."""

    def __get__(self, x: DistTensor | None, owner: type) -> TorchValue:
        if x is None:
            return self
        _leave(x)
        if _NAME not in vars(x):
            raise AttributeError(_NAME)
        return vars(x)[_NAME]

    def __set__(self, x: DistTensor, value: TorchValue) -> None:
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
            f"one graph of {code.co_name}, {code.co_filename}:{code.co_firstlineno}",
            repr(x._spec),
            "a graph would hold the local sizes of one rank, so functions with distributed tensors are not compiled",
            "leave out fullgraph=True, so that the function runs uncompiled, or compile a step with mw.to_static",
        )
    raise SkipFrame(f"uses a distributed tensor, {x._spec!r}")


def _code_in(modules: Iterable[ModuleType]) -> Iterator[CodeType]:
    """Yield the code of every function and method that the modules define, closures included."""
    for module in modules:
        for function in _functions_in(module):
            yield from _with_closures(function.__code__)


def _functions_in(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that the module defines."""
    own = [member for member in vars(module).values() if getattr(member, "__module__", None) == module.__name__]
    methods = [method for cls in own if isinstance(cls, type) for method in vars(cls).values()]
    for member in (*own, *methods):
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            yield function


def _with_closures(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _with_closures(inner)


def leave_alone() -> None:
    """Make `torch.compile` run this package's functions, and the functions that they call, without compiling them."""
    package = __name__.rpartition(".")[0]
    for code in _code_in([module for name, module in sys.modules.items() if name.startswith(package)]):
        run_uncompiled(code)


setattr(DistTensor, _NAME, _StaticAddress())
_PACKAGES = [package.name for package in pkgutil.iter_modules([str(Path(__file__).parents[2])])]
_COMPILED = ("models", "quantize")
"""Packages with modules that users compile."""
leave_untraced(f"{__name__.partition('.')[0]}.{name}" for name in _PACKAGES if name not in _COMPILED)
