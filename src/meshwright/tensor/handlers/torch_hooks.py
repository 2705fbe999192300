"""The private torch names that handlers need: `torch.compile`, guarded operators and `torch.distributed`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import exc, symbolic_convert, trace_rules
from torch._ops import OpOverload

from meshwright.layout import TorchValue

from .._torch_call import Arguments, TorchFunction
from ..torch_hooks import interception_on

same_kind: Callable[[torch.Tensor, torch.Tensor], bool] = getattr(torch, "_has_compatible_shallow_copy_type")  # noqa: B009 - not in torch's stubs
"""Check that `nn.Module.to` makes before it replaces the data of a parameter."""


class _Encoder:
    meshwright_own: Callable[..., torch.Tensor]
    meshwright_told: Callable[..., torch.Tensor]

    def forward(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.meshwright_own(src, mask, src_key_padding_mask, is_causal)
        return self.meshwright_told(src, mask, src_key_padding_mask, is_causal)


def intercept_encoders(forward: TorchFunction) -> None:
    """Replace `nn.TransformerEncoder.forward(encoder, src, ...)` by `forward(own, encoder, src, ...)`, from now on.

    The encoder takes another path if a tensor has `__torch_function__`, without calling a function that shows this. Its
    code is exchanged and keeps its place in torch's source, where `torch.compile` and `torch.jit.script` look for it.
    """
    encoder: TorchValue = torch.nn.TransformerEncoder
    function: TorchValue = encoder.forward
    code: CodeType = function.__code__
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    encoder.meshwright_own = own
    encoder.meshwright_told = lambda self, *given: forward(own, self, *given)
    told = _Encoder.forward.__code__
    function.__code__ = told.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)


SkipFrame: type[Exception] = exc.SkipFrame
"""The error that stops a trace of `torch.compile`: the function then runs as plain Python."""


def compile_trace() -> symbolic_convert.InstructionTranslatorBase | None:
    """Return the trace that `torch.compile` is making in this thread, or None."""
    return getattr(symbolic_convert.tls, "current_tx", None)


def leave_untraced(packages: Iterable[str]) -> None:
    """Let `torch.compile` call the functions of these packages and never trace them.

    Torch compiles one regular expression of all names after each `add`, which takes 20 ms; here it does so once.
    """
    compile_expression = trace_rules._recompile_re
    trace_rules._recompile_re = lambda: None
    try:
        for package in packages:
            trace_rules.add(package)
    finally:
        trace_rules._recompile_re = compile_expression
    compile_expression()


def run_uncompiled(code: CodeType) -> None:
    """Make `torch.compile` skip frames of this code and the frames that they call, from now on."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def _keys_below(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Return the dispatch keys below `key`."""
    return torch._C._dispatch_keyset_full_after(key)


_SELECT = torch._C.DispatchKey.BackendSelect
_BELOW_SELECT = _keys_below(_SELECT)
_AUTOGRAD_KEYS = tuple(f"Autograd{device}" for device in ("CPU", "CUDA", "XPU", "MPS", "XLA", "HPU", "PrivateUse1"))
"""The dispatch keys of autograd, one for each kind of device."""
_LIBRARIES: dict[str, torch.library.Library] = {}
"""Namespace → the library that holds the kernels of this package; torch removes kernels when their library is freed."""

Guard = Callable[[OpOverload, Arguments, TorchFunction], TorchValue]
"""`guard(op, args, run)`; `run(*args)` is the operator below the guard."""


def guard_operator(op: OpOverload, guard: Guard) -> None:
    """Replace calls of `op` that reach its kernel with interception on by `guard(op, args, run)`, from now on.

    C++ functions that take a number or a process group from a tensor never call `__torch_function__`, but they all call
    operators. The guard is at the dispatch key BackendSelect, which neither modes nor inference tensors skip.
    """

    def kernel(keys: torch._C.DispatchKeySet, *args: TorchValue) -> TorchValue:
        if not interception_on():
            return op.redispatch(keys & _BELOW_SELECT, *args)
        return guard(op, args, lambda *given: op.redispatch(keys & _BELOW_SELECT, *given))

    _implement(op, kernel, ("BackendSelect",))


def guard_set_data(guard: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Call `guard(x, new)` before every `x.data = new` of a plain tensor `x`, from now on.

    torch calls `__torch_function__` only for `x`. An operator then checks whether `x` can take over the memory of
    `new`, and the guard is at this operator.
    """
    op = torch.ops.aten._has_compatible_shallow_copy_type.default

    def kernel(keys: torch._C.DispatchKeySet, x: torch.Tensor, new: torch.Tensor) -> bool:
        fits = op.redispatch(keys & _keys_below(torch._C.DispatchKey.AutogradFunctionality), x, new)
        if fits and interception_on():
            guard(x, new)
        return fits

    _implement(op, kernel, _AUTOGRAD_KEYS)


def _implement(op: OpOverload, kernel: TorchFunction, keys: Iterable[str]) -> None:
    library = _LIBRARIES.setdefault(op.namespace, torch.library.Library(op.namespace, "IMPL"))
    for key in keys:
        library.impl(op, kernel, key, with_keyset=True)


read_number: OpOverload = torch.ops.aten._local_scalar_dense.default
"""The operator by which C++ reads the Python number of a tensor, also of a tensor passed in place of a number."""


_c10d: TorchValue = getattr(torch._C, "_distributed_c10d", None)
"""The C++ module of torch.distributed; None in a torch that was built without it."""


def collective_operators() -> list[OpOverload]:
    """Return every operator that process groups of torch.distributed call."""
    names = [n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    return [getattr(torch.ops.c10d, name).default for name in names if "." not in name]


def group_of(boxed: torch.ScriptObject) -> torch.distributed.ProcessGroup:
    """Return the process group that an operator of torch.distributed was given."""
    return _c10d.ProcessGroup.unbox(boxed)


def work_of(boxed: torch.ScriptObject) -> torch.distributed.Work:
    """Return the handle to wait on that an operator of torch.distributed returned."""
    return _c10d.Work.unbox(boxed)


def constructors_of_distributed() -> list[tuple[object, str]]:
    """Return (owner, name) of C++ functions in torch.distributed that use tensors below every guarded operator.

    These are the parts of DistributedDataParallel, and the constructor of a DTensor.
    """
    modules = (torch.distributed, torch.distributed.distributed_c10d, _c10d)
    names = sorted(name for name, f in vars(_c10d).items() if _takes_tensors(f))
    found: list[tuple[object, str]] = [(m, name) for name in names for m in modules if hasattr(m, name)]
    if hasattr(torch.Tensor, "_dtensor__new__"):
        found.append((torch.Tensor, "_dtensor__new__"))
    loaded = sys.modules.get("torch.distributed.tensor")  # importing it takes as long as torch itself
    return found if loaded is None else [*found, (loaded.DTensor, "__new__")]


def _takes_tensors(function: object) -> bool:
    """True if the signature in the docstring of a C++ function or constructor has tensors."""
    text = function.__init__.__doc__ if isinstance(function, type) else getattr(function, "__doc__", None)
    return "torch.Tensor" in (text or "").partition("->")[0]


def offer_set(name: str, handler: Callable[[torch.Tensor, TorchValue], bool]) -> None:
    """Pass every `x.name = new` to `handler(x, new)` first, which returns False to leave the assignment to torch.

    This is for attributes whose C++ setters never call `__torch_function__`.
    """
    own: TorchValue = getattr(torch.Tensor, name)

    def setter(x: torch.Tensor, new: TorchValue) -> None:
        if not (interception_on() and handler(x, new)):
            own.__set__(x, new)

    setattr(torch.Tensor, name, property(own.__get__, setter, doc=own.__doc__))
