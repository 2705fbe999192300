"""The private torch names that this package needs, each with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from threading import local
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import exc, symbolic_convert, trace_rules
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
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
from torch.jit import _recursive
from torch.jit._builtins import _find_builtin, _register_builtin  # lets torch.jit.script know replaced functions
from torch.utils import checkpoint
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

same_kind: Callable[[torch.Tensor, torch.Tensor], bool] = getattr(torch, "_has_compatible_shallow_copy_type")  # noqa: B009 - not in torch's stubs
"""Check that `nn.Module.to` makes before it replaces the data of a parameter."""

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


class _InterceptedApply:
    @classmethod
    def apply(cls, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        told: TorchValue = __class__  # the class of the function with this code: torch.autograd.Function
        return told.meshwright_told(cls, args, kwargs)


def intercept_functions(apply: TorchFunction, untold: Callable[[type[torch.autograd.Function]], None]) -> None:
    """Replace `F.apply(*args, **kwargs)` of autograd functions by `apply(F, its own apply, args, kwargs)`, from now on.

    This is the only hook that shows which operators belong to a function with its own backward pass. torch passes local
    gradients to that function without calling `__torch_function__`. If torch has `apply` in Python, its code object is
    exchanged, so that earlier names (`swish = Swish.apply`) are covered too. If it is in C, calls by such a name run
    `untold(F)`.
    """
    function: TorchValue = torch.autograd.Function
    member = function.__dict__["apply"]
    python: TorchValue = getattr(member, "__func__", None)
    if python is None:  # torch 2.15 has it in C
        own = partial(_apply_reported, member)
        function.apply = classmethod(_by_name)
        for early in _subclasses_with_forward(function):
            early.forward = _forward_of(early, early.forward, untold)
    else:
        kept = python.__code__, python.__globals__, python.__name__, python.__defaults__, python.__closure__
        own = partial(MethodType, FunctionType(*kept))
        told = _InterceptedApply.__dict__["apply"].__func__.__code__
        python.__code__ = told.replace(co_filename=python.__code__.co_filename)  # by which torch.compile knows it
    function.meshwright_told = staticmethod(lambda cls, args, kwargs: apply(cls, own(cls), args, kwargs))


def _by_name(cls: type[torch.autograd.Function], *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
    told: TorchValue = torch.autograd.Function
    return told.meshwright_told(cls, args, kwargs)


_by_name.__name__ = "apply"  # by which torch.compile knows it
_reporting = local()


def _apply_reported(member: TorchValue, function: type[torch.autograd.Function]) -> TorchFunction:
    """Return `F.apply` with a flag for the forward function that the call was reported."""

    def call(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        before = getattr(_reporting, "on", False)
        _reporting.on = True
        try:
            return member.__get__(None, function)(*args, **kwargs)
        finally:
            _reporting.on = before

    return call


def _forward_of(
    function: type[torch.autograd.Function],
    own: TorchFunction,
    untold: Callable[[type[torch.autograd.Function]], None],
) -> staticmethod[..., TorchValue]:
    """Return the forward function of a class, which calls `untold` if the call was not reported."""

    def forward(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        if not torch.compiler.is_compiling() and not getattr(_reporting, "on", False):
            untold(function)
        return own(*args, **kwargs)

    return staticmethod(forward)


def _subclasses_with_forward(function: type[torch.autograd.Function]) -> list[TorchValue]:
    """Return the subclasses that define a forward function."""
    below = [c for sub in function.__subclasses__() for c in (sub, *_subclasses_with_forward(sub))]
    return [c for c in dict.fromkeys(below) if "forward" in vars(c)]


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


GraphError: type[Exception] = exc.UncapturedHigherOrderOpError
"""The error that `torch.compile` passes on unchanged, also out of operators such as `torch.cond`."""

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


transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside a transform of `torch.func`, in this thread."""


def run_uncompiled(code: CodeType) -> None:
    """Make `torch.compile` skip frames of this code and the frames that they call, from now on."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes that see the operators of this thread."""

function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack")  # noqa: B009 - not in torch's stubs
"""Returns the number of function modes that see the calls of this thread."""

jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Returns True inside `torch.jit.trace`, in this thread."""

graph_tracing: Callable[[], TorchValue] = proxy_tensor.get_proxy_mode
"""Returns the mode by which `make_fx` records operators, or None outside of it."""

transforms_paused = temporarily_clear_interpreter_stack
"""Context in which tensors are computed as outside of all transforms."""


def forward_mode() -> bool:
    """True while some thread of this process computes derivatives in forward mode."""
    return forward_ad._current_level >= 0


MAKE_DUAL: TorchFunction = getattr(torch, "_make_dual")  # noqa: B009 - not in torch's stubs
"""The C++ part of `forward_ad.make_dual`."""

UNPACK_DUAL: TorchFunction = getattr(torch, "_unpack_dual")  # noqa: B009 - not in torch's stubs
"""The C++ part of `forward_ad.unpack_dual`."""

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


_INTO = {
    eager_transforms: ("_wrap_for_grad",),
    functorch_vmap: ("_add_batch_dim", "_remove_batch_dim"),
}
"""Functions that take a tensor into a transform, or out of it; torch treats the part as the whole there."""

_AROUND = {
    eager_transforms: ("_jvp_with_argnums", "_vjp_with_argnums", "grad_and_value_impl"),
    functorch_vmap: ("_flat_vmap",),
}
"""The functions that call a transformed function."""

_functorch = vars(torch._C)["_functorch"]


def outside_transforms(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor in the wrappers of transforms.

    None for a batch, or a function of the differentiated variable.
    """
    while _functorch.is_functorch_wrapped_tensor(x):
        if not _functorch.is_gradtrackingtensor(x) or x.requires_grad:
            return None
        x = _functorch.get_unwrapped(x)
    return x


def intercept_transforms(
    entering: Callable[[TorchValue], TorchValue],
    check_functional: Callable[[TorchValue], None],
    around: Callable[[], AbstractContextManager[None]],
) -> None:
    """Make transforms of `torch.func` take `entering(x)` in place of each input `x`, from now on.

    Each transform runs inside the context `around()`. Forward mode converts its inputs before it begins.
    `functionalize` calls `check_functional(x)` first.
    """

    def taking(own: TorchFunction) -> TorchFunction:
        return lambda x, *rest: own(entering(x), *rest)

    def inside(own: TorchFunction) -> TorchFunction:
        def call(*args: TorchValue, **how: TorchValue) -> TorchValue:
            if torch.compiler.is_compiling():
                return own(*args, **how)
            with around():
                return own(*args, **how)

        return call

    forward = eager_transforms._jvp_with_argnums

    def forward_of(
        func: TorchFunction, primals: TorchValue, tangents: TorchValue, *rest: TorchValue, **how: TorchValue
    ) -> TorchValue:
        primals, tangents = tree_map(entering, (primals, tangents))
        return forward(func, primals, tangents, *rest, **how)

    backward = eager_transforms._autograd_grad

    def backward_of(
        outputs: TorchValue, inputs: TorchValue, seeds: TorchValue = None, *rest: TorchValue, **how: TorchValue
    ) -> TorchValue:
        return backward(outputs, inputs, tree_map(entering, seeds), *rest, **how)

    functional = vars(eager_transforms)["_wrap_functional_tensor"]

    def functional_of(x: TorchValue, *rest: TorchValue) -> TorchValue:
        check_functional(x)
        return functional(x, *rest)

    given: dict[str, TorchFunction] = {
        "_wrap_functional_tensor": functional_of,
        "_jvp_with_argnums": forward_of,
        "_autograd_grad": backward_of,
    }
    eager_transforms.__dict__.update(given)
    _replace_functions(_INTO, taking)
    _replace_functions(_AROUND, inside)


def _replace_functions(names: dict[ModuleType, tuple[str, ...]], replaced: Callable[[TorchFunction], object]) -> None:
    """Replace functions of modules by `replaced(function)`."""
    for module, found in names.items():
        for name in found:
            setattr(module, name, replaced(getattr(module, name)))


def intercept_scripts(check: Callable[[torch.nn.Module], None]) -> None:
    """Make `torch.jit.script` call `check(module)` before it reads the parameters of a module, from now on."""
    own = _recursive.create_script_module

    def create(module: torch.nn.Module, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        check(module)
        return own(module, *args, **kwargs)

    _recursive.create_script_module = create


def is_dense(x: torch.Tensor) -> bool:
    """True for a tensor of ordinary memory: not sparse, not nested, not a batch of the older vmap."""
    return x.layout is torch.strided and not x.is_nested and not is_batched(x)


SCRIPTED = (torch.jit.ScriptFunction, torch.ScriptMethod)
"""Functions of TorchScript."""

_META_EXTRACTOR = _default_meta_extractor.__code__
"""Code of the function by which `torch.utils.checkpoint` compares recomputed tensors."""


def savers() -> list[tuple[object, str]]:
    """Return (owner, name) of the C++ functions that save a tensor for a backward pass outside of a Function."""
    name = "_make_saved_tensor"
    return [(checkpoint, name)] if hasattr(checkpoint, name) else []


_ENGINE = _engine_run_backward.__code__


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


def node_finders() -> list[tuple[object, str]]:
    """Return (owner, name) of the function by which torch finds the autograd nodes of tensors, to compare them."""
    name = "_get_grad_fn_or_grad_acc"
    return [(torch.autograd.graph, name)] if hasattr(torch.autograd.graph, name) else []


def view_replay() -> AbstractContextManager[None]:
    """Context in which autograd repeats views as they were made, instead of by `as_strided`.

    The gradient of `as_strided` on an empty tensor is a constant: a rank without a piece would drop out of the second
    derivative, and of the collectives in it.
    """
    return _force_original_view_tracking(True)


def run_backward(
    outputs: list[torch.Tensor],
    seeds: list[TorchValue],
    keep: bool,
    create: bool,
    inputs: Arguments,
    **how: TorchValue,
) -> Arguments:
    """Run the autograd engine itself.

    Public functions would call `__torch_function__` of distributed `inputs` first.
    """
    try:
        with view_replay() if create else nullcontext():
            return _engine_run_backward(tuple(outputs), tuple(seeds), keep, create, inputs, **how)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            error.add_note("the shape above is that of this rank's part of a distributed tensor")
        raise


def intercept_backward(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run every backward pass of plain tensors inside `context()`, from now on.

    It calls no distributed tensor otherwise.
    """
    own = vars(torch.autograd)["_engine_run_backward"]

    def run(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        with context():
            return own(*args, **kwargs)

    torch.autograd.__dict__.update(_engine_run_backward=run)


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


def _plainly(op: Operator, args: Arguments, kwargs: NamedArguments) -> TorchValue:
    if op is torch.ops.aten._grouped_mm.default and args[0].is_meta:
        return grouped_product(*args, **kwargs)
    if op is torch.ops.aten.view.default and not fake_tensor.is_fake(args[0]):
        with torch._C._DisablePythonDispatcher():  # torch's Python kernel accepts strides that the C++ kernel refuses
            return op(*args, **kwargs)
    return op(*args, **kwargs)


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

    def __init__(self, note: Callable[[Operator, Arguments, NamedArguments, TorchValue], None], run: Run) -> None:
        self.note, self.run = note, run
        self._dispatch_key = torch._C.DispatchKey.PreDispatch  # where it is put back after `no_modes`

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: NamedArguments | None = None,
    ) -> TorchValue:
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
    note: Callable[[Operator, Arguments, NamedArguments, TorchValue], None], run: Run = _plainly
) -> Generator[None]:
    """Call `note` for every ATen operator called inside the block, before autograd; `run` carries the operator out."""
    _set_mode_pre_dispatch(_Recorder(note, run))
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


def _keys_below(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Return the dispatch keys below `key`."""
    return torch._C._dispatch_keyset_full_after(key)


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


Offered = Callable[[TorchFunction, Arguments, NamedArguments], TorchValue]
"""`handler(own, args, kwargs)` returns the result, or NotImplemented to leave the call to torch's function `own`."""


def offer_set(name: str, handler: Callable[[torch.Tensor, TorchValue], bool]) -> None:
    """Pass every `x.name = new` to `handler(x, new)` first, which returns False to leave the assignment to torch.

    This is for attributes whose C++ setters never call `__torch_function__`.
    """
    own: TorchValue = getattr(torch.Tensor, name)

    def setter(x: torch.Tensor, new: TorchValue) -> None:
        if not (interception_on() and handler(x, new)):
            own.__set__(x, new)

    setattr(torch.Tensor, name, property(own.__get__, setter, doc=own.__doc__))


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
