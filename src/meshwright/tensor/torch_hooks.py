"""The private torch names that this package needs, each with the reason; subpackages have those that only they need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from types import BuiltinFunctionType

import torch
from torch._dynamo import exc
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import (
    OpOverload,
    OpOverloadPacket,
    _len_torch_dispatch_stack_pre_dispatch,
    _pop_mode_from_pre_dispatch,
    _set_mode_pre_dispatch,
)
from torch._subclasses import fake_tensor
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _force_original_view_tracking, _unsafe_preserve_version_counter
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental import proxy_tensor
from torch.jit._builtins import _find_builtin, _register_builtin  # lets torch.jit.script know replaced functions
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import _default_meta_extractor

from meshwright.layout import TorchValue

from ._torch_call import Arguments, NamedArguments, TorchFunction

Operator = OpOverload
"""An ATen operator overload; its class and `_schema` have no public name."""

OperatorPacket = OpOverloadPacket
"""All overloads of an operator, such as `torch.ops.aten.add`; its class has no public name."""

FakeTensor: type[torch.Tensor] = fake_tensor.FakeTensor
"""A tensor with a shape, a dtype and a device, but no elements."""

DynamicShapeError: type[Exception] = fake_tensor.DynamicOutputShapeException
"""Raised on fake tensors by an operator whose result has a shape that depends on values."""

ValueNeededError: type[Exception] = fake_tensor.DataDependentOutputException
"""Raised on fake tensors by an operator that returns a number to the host."""

call_plain: TorchFunction = torch._C._disabled_torch_function_impl
"""`call_plain(func, types, args, kwargs)` calls with interception off; cheaper than a `with` block."""

no_interception = torch._C.DisableTorchFunctionSubclass
"""Context in which DistTensors behave as their local tensors."""

interception: Callable[[], AbstractContextManager[None]] = getattr(torch._C, "_EnableTorchFunction")  # noqa: B009 - not in torch's stubs
"""Context in which DistTensors are the whole tensors again, inside `no_interception`."""

interception_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""False inside `no_interception` and `call_plain`, where a DistTensor must behave as its local part."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switch grad mode on or off; `torch.set_grad_enabled` is a class that also restores it."""

backward_running: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread is in, -1 outside of one."""

unscale: Callable[..., None] = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_")  # noqa: B009 - not in torch's stubs
"""Function that a gradient scaler calls on all gradients at once."""

seeded_tag = torch.Tag.nondeterministic_seeded
"""Tag of the operators that draw from a random generator."""


def unwritten(new: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to a new tensor do not count.

    Its version stays 0, like that of an operator's result.
    """
    return nullcontext() if new.is_inference() else _unsafe_preserve_version_counter(new)


def bare_apply(function: type[torch.autograd.Function]) -> TorchFunction:
    """Return `function.apply` without the Python code that looks for functorch transforms.

    Those run on whole tensors.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue] - of its base in C


def bare_backward(function: type[torch.autograd.Function]) -> None:
    """Make autograd call `function.backward` itself, without the Python code that looks it up in each call."""
    node: TorchValue = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward


GraphError: type[Exception] = exc.UncapturedHigherOrderOpError
"""The error that `torch.compile` passes on unchanged, also out of operators such as `torch.cond`."""


transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside a transform of `torch.func`, in this thread."""


modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes that see the operators of this thread."""

function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack")  # noqa: B009 - not in torch's stubs
"""Returns the number of function modes that see the calls of this thread."""

active_function_modes: Callable[[], list[TorchValue]] = _get_current_function_mode_stack
"""Returns the function modes that see the calls of this thread, outermost first."""

jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Returns True inside `torch.jit.trace`, in this thread."""

graph_tracing: Callable[[], TorchValue] = proxy_tensor.get_proxy_mode
"""Returns the mode by which `make_fx` records operators, or None outside of it."""

transforms_paused = temporarily_clear_interpreter_stack
"""Context in which tensors are computed as outside of all transforms."""


def forward_mode() -> bool:
    """True while some thread of this process computes derivatives in forward mode."""
    return forward_ad._current_level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """True for a plain tensor with a tangent of forward mode."""
    return forward_mode() and forward_ad.unpack_dual(x).tangent is not None


is_batched: Callable[[torch.Tensor], bool] = vars(torch._C)["_functorch"].is_legacy_batchedtensor
"""True for a tensor of the older vmap, which `torch.autograd.functional` and `gradcheck` still use."""


def keep_bits(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return `run(x)` with the conj and neg bits of `x`, for a function that only moves or copies elements.

    A tensor with its conj bit set reads the conjugates of the numbers in its memory; `x.conj()` sets this bit and does
    not copy. `run` gets a tensor without such bits. Call `keep_bits` with interception off.
    """
    is_conj, is_neg = x.is_conj(), x.is_neg()
    if not (is_conj or is_neg):
        return run(x)
    neg_view: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, "_neg_view")  # noqa: B009 - not in torch's stubs
    x = x.conj() if is_conj else x
    out = run(neg_view(x) if is_neg else x)
    if torch.is_grad_enabled() and out.requires_grad:
        out = neg_view(out) if is_neg else out
        return out.conj() if is_conj else out
    getattr(torch._C, "_set_conj")(out, is_conj)  # noqa: B009 - not in torch's stubs
    getattr(torch._C, "_set_neg")(out, is_neg)  # noqa: B009 - not in torch's stubs
    return out


_functorch = vars(torch._C)["_functorch"]


def outside_transforms(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor in the wrappers of transforms.

    None for a batch, or a function of the differentiated variable.
    """
    while _functorch.is_functorch_wrapped_tensor(x):
        if not _functorch.is_gradtrackingtensor(x) or x.requires_grad or has_tangent(x):
            return None
        x = _functorch.get_unwrapped(x)
    return x


def is_of_transform(x: torch.Tensor) -> bool:
    """True for a batch of a running transform, or a function of its differentiated variable."""
    return transforming() and outside_transforms(x) is None


def is_dense(x: torch.Tensor) -> bool:
    """True for a tensor of ordinary memory: not sparse, not nested, not a batch of the older vmap."""
    return x.layout is torch.strided and not x.is_nested and not is_batched(x)


_META_EXTRACTOR = _default_meta_extractor.__code__
"""Code of the function by which `torch.utils.checkpoint` compares recomputed tensors."""


_ENGINE = _engine_run_backward.__code__
"""Code of the function that calls the autograd engine."""


def seen_below_autograd() -> bool:
    """True if the caller runs below autograd, where attributes are those of the local part.

    Two callers do: a `__torch_dispatch__` of the user inside this thread's backward pass, where torch does not keep
    interception off, and the check in `torch.utils.checkpoint` that recomputed tensors have the same shapes.
    """
    if backward_running() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is _META_EXTRACTOR:
            return True
        if frame.f_code.co_name == "__torch_dispatch__":
            return frame.f_globals is not globals()  # a mode of this file calls operators on distributed tensors
        frame = frame.f_back
    return False


def view_replay() -> AbstractContextManager[None]:
    """Context in which autograd repeats views as they were made, instead of by `as_strided`.

    The gradient of `as_strided` on an empty tensor is a constant: a rank without a piece would drop out of the second
    derivative, and of the collectives in it.
    """
    return _force_original_view_tracking(True)


Run = Callable[[Operator, Arguments, NamedArguments], TorchValue]


def grouped_product(
    x: torch.Tensor, w: torch.Tensor, offs: TorchValue = None, bias: object = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the product of groups on the meta device.

    Torch's own refuses all dtypes but bfloat16, its kernels do not.
    """
    del bias
    shape = [x.shape[-2], w.shape[-1]]
    if x.dim() == w.dim():
        batch = x if x.dim() == 3 else offs
        shape.insert(0, batch.shape[0])
    return torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)


_FAKE_QUANTIZATION = (
    "aten::fake_quantize_per_channel_affine",
    "aten::fake_quantize_per_tensor_affine",
    "aten::_fake_quantize_learnable_per_channel_affine",
    "aten::_fake_quantize_learnable_per_tensor_affine",
)
_FAKE_QUANTIZATION_WITH_MASK = (
    "aten::fake_quantize_per_channel_affine_cachemask",
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)
"""Elementwise operators without a meta kernel; the second ones return a mask too."""


def _plainly(op: Operator, args: Arguments, kwargs: NamedArguments) -> TorchValue:
    if op is torch.ops.aten._grouped_mm.default and args[0].is_meta:
        return grouped_product(*args, **kwargs)
    if op.name().partition(".")[0] in _FAKE_QUANTIZATION and args[0].is_meta:
        return torch.empty_like(args[0])
    if op.name().partition(".")[0] in _FAKE_QUANTIZATION_WITH_MASK and args[0].is_meta:
        return torch.empty_like(args[0]), torch.empty_like(args[0], dtype=torch.bool)
    if op in _WRONG_IN_PYTHON and not fake_tensor.is_fake(args[0]):
        with torch._C._DisablePythonDispatcher():
            return op(*args, **kwargs)
    return op(*args, **kwargs)


_WRONG_IN_PYTHON = frozenset(
    {
        torch.ops.aten.view.default,  # accepts strides that the C++ kernel refuses
        torch.ops.aten.nll_loss.default,  # the result has no dims, whatever the reduction
        torch.ops.aten.nll_loss_nd.default,
        torch.ops.aten.cross_entropy_loss.default,
    }
)
"""Operators whose Python kernels differ from those in C++, which call the same ones."""


def as_on(device: torch.device | None) -> Run:
    """Return a function that runs an operator on meta tensors, with the sizes and strides of its results on a device.

    torch chooses kernels of some operators by device, and they differ in the memory order of their results, or in the
    sizes of results that only a backward pass reads.
    """

    def run(op: Operator, args: Arguments, kwargs: NamedArguments) -> TorchValue:
        out = _plainly(op, args, kwargs)
        if device is None or not _is_chosen_by_device(op, args) or is_fake(args[0]):
            return out
        try:
            with fake_tensor.FakeTensorMode():
                real = op(*tree_map(partial(_like_on, device), args), **tree_map(partial(_like_on, device), kwargs))
        except Exception:  # the device is missing on this machine, or torch has no fake kernel
            return out
        return tree_map(lambda x, y: _like_on(x.device, y), out, real)

    return run


_CHOSEN_BY_DEVICE = tuple(
    f"aten::{name}"
    for name in ("scaled_dot_product_attention", "embedding_bag", "fft_", "stft", "linalg_eig", "linalg_svd", "svd")
)
"""Prefixes of names of operators whose results depend on the device."""

_ORDERED_BY_DEVICE = tuple(
    f"aten::{name}"
    for name in ("conv", "group_norm", "native_group_norm", "pad", "reflection_pad", "replication_pad", "fake_quantize")
)
"""Prefixes of names of operators whose memory order depends on the device if an operand is not contiguous."""

is_fake: Callable[[object], bool] = fake_tensor.is_fake
"""True for a fake tensor."""


def _is_chosen_by_device(op: Operator, args: Arguments) -> bool:
    name = op.name()
    if not name.startswith(_ORDERED_BY_DEVICE):
        return name.startswith(_CHOSEN_BY_DEVICE)
    return any(isinstance(x, torch.Tensor) and not x.is_contiguous() for x in args)


def _like_on(device: torch.device, x: object) -> object:
    """Return an empty tensor like `x` on a device; `x` itself if it is no tensor."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


class _Recorder(SchemaCheckMode):
    """Mode that sees every operator before autograd, and before composite operators are decomposed.

    torch allows three kinds of modes at that level; the one for checking schemas is the only one that may stand alone.
    """

    def __init__(
        self,
        note: Callable[[Operator, Arguments, NamedArguments, TorchValue], None],
        run: Run,
        in_parts: bool,
    ) -> None:
        self.note, self.run, self.in_parts = note, run, in_parts
        self._dispatch_key = torch._C.DispatchKey.PreDispatch  # where it is put back after `no_modes`

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: NamedArguments | None = None,
    ) -> TorchValue:
        if self.in_parts and func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = self.run(func, args, kwargs or {})
        self.note(func, args, kwargs or {}, out)
        return out


@contextmanager
def imagining(sizes: Iterable[object], always: bool = False) -> Generator[None]:
    """Use fake tensors inside the block if some of the sizes are symbolic; plain meta tensors would fix these sizes.

    With `always`, use them in any case: fake tensors have a device, so autocast treats them like real ones.
    """
    env = next((n.node.shape_env for n in sizes if isinstance(n, torch.SymInt)), None)
    fake = always or env is not None
    with fake_tensor.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) if fake else nullcontext():
        yield


@contextmanager
def operators_recorded(
    note: Callable[[Operator, Arguments, NamedArguments, TorchValue], None],
    run: Run = _plainly,
    in_parts: bool = False,
) -> Generator[None]:
    """Call `note` for every ATen operator called inside the block, before autograd; `run` carries the operator out.

    With `in_parts`, the operators that a composite operator consists of are noted instead of it.
    """
    _set_mode_pre_dispatch(_Recorder(note, run, in_parts))
    try:
        with torch._C._EnablePythonDispatcher(), torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        _pop_mode_from_pre_dispatch()


def parameters_of(op: Operator, without: Container[str] = ()) -> list[tuple[str, str]]:
    """Return the names and types of an operator's arguments; overloads that accept the same call share them."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]


def positional(func: TorchValue, args: Arguments, kwargs: NamedArguments) -> tuple[Arguments, NamedArguments]:
    """Return the arguments of a call, with an operator's named arguments moved to their places in its schema."""
    if not kwargs or not isinstance(func, Operator):
        return args, kwargs
    left = dict(kwargs)
    for a in func._schema.arguments[len(args) :]:
        if a.kwarg_only or a.name not in left:
            break
        args = (*args, left.pop(a.name))
    return args, left


def returns_dtype(op: Operator) -> bool:
    """True if the integer that an operator returns is the number of a dtype; for Python its type is `int`."""
    return any(str(getattr(r, "real_type", "")) == "ScalarType" for r in op._schema.returns)


def written_arguments(op: Operator) -> list[torch._C.Argument]:
    """Return the arguments that an operator's schema marks as written."""
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def composite_kernel(op: Operator) -> TorchFunction | None:
    """Return the C++ decomposition of a composite operator; None for an operator with its own kernels."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if op.namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return None
    return partial(op._op_dk, key)


def list_kernel(op: Operator) -> TorchFunction | None:
    """Return torch's loop over the entries of a `_foreach_` operator's lists; None for another operator."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    is_loop = op.namespace == "aten" and op._schema.name.startswith("aten::_foreach_")
    if not is_loop or not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return None
    return partial(op._op_dk, key)


def modes_before_dispatch() -> bool:
    """True while a mode sees operators before autograd; torch allows only one such mode."""
    return _len_torch_dispatch_stack_pre_dispatch() > 0


no_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""Context in which no mode sees the calls, since the planning of a call is not part of the caller's program."""


shares_storage: Callable[[torch.Tensor, torch.Tensor], bool] = getattr(torch._C, "_is_alias_of")  # noqa: B009 - not in torch's stubs
"""True if two tensors have the same storage."""


def tensors_on_storage(x: torch.Tensor) -> int:
    """Return the number of tensors that use the memory of `x`, including `x`; call it with interception off.

    A base that only its view `x` keeps alive does not count.
    """
    storage = x.untyped_storage()
    uses = int(getattr(torch._C, "_storage_Use_Count")(storage._cdata)) - 1  # noqa: B009 - without the `storage` here
    base = x._base
    if base is None:
        return uses
    only = sys.getrefcount(base) <= _OF_A_BASE and getattr(base, "_use_count")() <= 2  # noqa: B009 - not in torch's stubs
    return uses - 1 if only else uses


_OF_A_BASE = 3
"""References to a base that only its view keeps alive: a variable's, that of the count, and that of the C++ tensor."""


Offered = Callable[[TorchFunction, Arguments, NamedArguments], TorchValue]
"""`handler(own, args, kwargs)` returns the result, or NotImplemented to leave the call to torch's function `own`."""


def offer_call(owner: object, name: str, handler: Offered) -> None:
    """Pass every call `owner.name(*args, **kwargs)` to `handler` first.

    This is for C++ functions that take tensors and never call `__torch_function__`. Modules that imported the function
    by `from torch import …` before get the replacement too.
    """
    own = getattr(owner, name)
    is_static = isinstance(owner, type) and isinstance(own, BuiltinFunctionType)

    @wraps(own)
    def offered(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        out = handler(own, args, kwargs) if interception_on() else NotImplemented
        return own(*args, **kwargs) if out is NotImplemented else out

    setattr(owner, name, staticmethod(offered) if is_static else offered)
    if isinstance(owner, type):
        return
    constructors = _device_constructors()
    if own in constructors or offered in constructors:
        constructors.update((own, offered))  # modes get `own` from C++ and `offered` from Python
    scripted = _find_builtin(own)
    if scripted is not None:
        _register_builtin(offered, scripted)
    _rebind(name, own, offered)


def _rebind(name: str, old: object, new: object) -> None:
    """Replace `old` by `new` in modules outside torch that have `old` under this name."""
    for module_name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(name) is old and not f"{module_name}.".startswith("torch."):
            setattr(module, name, new)
