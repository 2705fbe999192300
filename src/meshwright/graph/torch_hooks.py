"""Private names of torch that this package uses, each with the reason."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib import import_module
from itertools import count
from operator import call
from typing import Any
from weakref import WeakSet

import torch
from torch import fx, nn
from torch._C._dynamo.guards import TensorGuards
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from meshwright.layout import TorchValue
from meshwright.tensor import active_function_modes, grouped_product

Operator = OpOverload
"""An ATen operator overload; its class and `_schema` have no public name."""

FakeMode = FakeTensorMode
"""Mode for fake tensors, which have a shape, a dtype and a device, but no data."""

with FakeTensorMode():  # torch 2.11 sets a guard in the first mode, and crashes if two threads do so at once
    pass

FakeTensor: type[torch.Tensor] = fake_tensor.FakeTensor
"""A tensor that has a shape, a dtype and a device, but no data."""


METADATA: Mapping[OpOverload, Callable[..., Any]] = fake_tensor._DISPATCH_META_HANDLERS
"""Operator → function of its arguments that returns metadata of a fake tensor: autograd asks for devices very often."""


def forget_numbers(x: TorchValue) -> None:
    """Remove the constant elements that a fake tensor may know."""
    x.constant = None


DataDependent = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    symbolic_shapes.GuardOnDataDependentSymNode,
)
"""Errors that fake tensors raise when Python code reads their elements."""

interception_off: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass
"""Context in which DistTensors act as their plain local tensors."""

unrecorded: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""Context in which calls are not recorded."""

no_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""Context in which the caller's dispatch modes see no calls."""

is_autocast_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled")  # noqa: B009 - not in torch's stubs
"""Function that returns whether autocast is on for any type of device."""


def modes_on() -> tuple[Any, ...]:
    """Return the active function modes and dispatch modes of this thread, outermost first."""
    return (*active_function_modes(), *_get_current_dispatch_mode_stack())


def dispatch_modes() -> tuple[Any, ...]:
    """Return the active dispatch modes of this thread."""
    return tuple(_get_current_dispatch_mode_stack())


def tensor_comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that is True for tensors like these, given in the same order.

    It compares classes, dtypes, devices, sizes, and whether a tensor requires a gradient, in C++: 50 ns for a tensor.
    It is False if a tensor occurs twice.
    """
    if not tensors:
        return lambda *others: not others
    sizes: TorchValue = [list(x.shape) for x in tensors]
    strides: TorchValue = [[None] * x.dim() for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


_autograd: TorchValue = getattr(torch._C, "_autograd")  # noqa: B009 - not in torch's stubs


def backward_hooks_of_all() -> list[Mapping[int, Any]]:
    """Return torch's global tables of backward hooks, which every layer calls."""
    return [nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks]


def saving_is_hooked() -> bool:
    """True inside `torch.autograd.graph.saved_tensors_hooks`."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


_FAKE_KERNELS: TorchValue = fake_impls.op_implementations_dict
"""Operator → kernel for fake tensors, if the kernel of the meta device cannot be used."""


def _grouped(mode: FakeTensorMode, op: OpOverload, *args: TorchValue, **kwargs: TorchValue) -> torch.Tensor:
    """Return the grouped matrix product on fake tensors, which torch's own kernel refuses, as on the meta device."""
    with mode:
        return grouped_product(*args, **kwargs)


_FAKE_KERNELS.setdefault(torch.ops.aten._grouped_mm.default, _grouped)


def _flags_of_backends() -> list[Callable[[], Any]]:
    """Return functions that read the flags of torch.backends."""
    found: list[Callable[[], Any]] = []
    for module in vars(torch.backends).values():
        found += [flag.getter for flag in vars(type(module)).values() if type(flag) is _Flag]
    sdp = torch.backends.cuda
    kinds = (sdp.flash_sdp_enabled, sdp.mem_efficient_sdp_enabled, sdp.math_sdp_enabled, sdp.cudnn_sdp_enabled)
    return [*found, *kinds]


_Flag: type | None = getattr(torch.backends, "ContextProp", None)
_FLAGS: list[Callable[[], Any]] = _flags_of_backends()


def backend_flags() -> tuple[Any, ...]:
    """Return the values of all flags of torch.backends."""
    return tuple(map(call, _FLAGS))


_FAILURES_TOLD: ContextVar[bool] = ContextVar("failures_told", default=False)
fake_tensor.log.addFilter(lambda record: record.levelno < logging.ERROR or not _FAILURES_TOLD.get())


@contextmanager
def failures_told() -> Generator[None]:
    """Suppress torch's log messages about failures on fake tensors inside the context; an error is raised anyway."""
    token = _FAILURES_TOLD.set(True)
    try:
        yield
    finally:
        _FAILURES_TOLD.reset(token)


@contextmanager
def imagining(mode: FakeTensorMode) -> Generator[FakeTensorMode]:
    """Create all new tensors as fake tensors of `mode` inside the context."""
    with mode:
        yield mode


def memory_of(x: torch.Tensor) -> int:
    """Return a key that is equal for tensors in the same memory, including fake tensors."""
    return x.untyped_storage()._cdata


def faked(mode: FakeMode, x: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the metadata of `x`; `x` itself if it is fake."""
    if isinstance(x, FakeTensor):
        return x
    with mode:
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)


next_gradient_number: Callable[[], int] = import_module("torch._C._autograd")._get_sequence_nr
"""Function that returns the sequence number of this thread's next autograd node."""


def running_gradient_number() -> int | None:
    """Return the sequence number of the autograd node whose backward function runs; None outside of any."""
    node: TorchValue = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


Modes = TorchDispatchMode
"""Base class of modes that intercept every operator below autograd."""

ShapeEnv = symbolic_shapes.ShapeEnv
"""Environment of symbolic numbers; with one, `.item()` of a fake tensor returns a symbol."""

_earlier: WeakSet[symbolic_shapes.ShapeEnv] = WeakSet()
"""Environments of symbolic numbers of recordings, as long as anything holds them."""
_MOST_FAKE_RESULTS = 1 << 14
"""Results on fake tensors that torch may remember; it has no bound of its own."""


def new_sizes(**options: TorchValue) -> symbolic_shapes.ShapeEnv:
    """Return a new ShapeEnv for a recording; torch forgets what it remembers of earlier ones.

    torch's caches hold every ShapeEnv for ever, and each ShapeEnv holds what was computed with its sizes. They are
    caches of methods, by the ShapeEnv itself, so a new ShapeEnv finds nothing in them.
    """
    for remembered in (*vars(ShapeEnv).values(), *vars(symbolic_shapes).values()):
        is_cache = hasattr(remembered, "cache_clear") and hasattr(remembered, "cache_info")
        if is_cache and remembered.cache_info().currsize > 1:  # one entry: a function without arguments
            remembered.cache_clear()
    for earlier in tuple(_earlier):  # plans of eager mode hold some of them by their specs
        earlier.fake_tensor_cache.clear()
    if len(FakeTensorMode.cache) > _MOST_FAKE_RESULTS:
        FakeTensorMode.cache_clear()
    found = ShapeEnv(**options)
    _earlier.add(found)
    return found


_numbers = count()
"""Counter for the names of symbols' sources, by which torch identifies symbols."""
_DYNAMIC = symbolic_shapes.DimDynamic.DYNAMIC


def _new_source(name: str) -> ConstantSource:
    return ConstantSource(f"{name}_{next(_numbers)}")


def symbolic_float(mode: FakeTensorMode, name: str, hint: float) -> TorchValue:
    """Return a new symbolic float in the ShapeEnv of `mode`."""
    env, source = _world(mode), _new_source(name)
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=_DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def symbolic_int(mode: FakeTensorMode, name: str, hint: int) -> TorchValue:
    """Return a new symbolic integer in the ShapeEnv of `mode`."""
    env, source = _world(mode), _new_source(name)
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=_DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


def symbolic_count(mode: FakeTensorMode, name: str, hint: int) -> TorchValue:
    """Return a new symbolic positive integer in the ShapeEnv of `mode`; powers of it need no guard."""
    env, source = _world(mode), _new_source(name)
    symbol = env.create_symbol(hint, source, _DYNAMIC, None, True, True)
    return env.create_symintnode(symbol, hint=hint, source=source)


def symbolic_size(mode: FakeTensorMode, name: str, hint: int) -> TorchValue:
    """Return a new symbolic size of at least two in the ShapeEnv of `mode`."""
    env, source = _world(mode), _new_source(name)
    symbol = env.create_symbol(hint, source, _DYNAMIC, None, True)
    return env.create_symintnode(symbol, hint=hint, source=source)


def named_symbol(world: symbolic_shapes.ShapeEnv, name: str, kind: str, hint: int) -> int | torch.SymInt:
    """Return a symbol of this name: a "size" of at least two, a "number", or one that is "found" while a program runs.

    torch derives a symbol's number from its source. Here the number in the name is used, if there is one.
    """
    if kind == "found":
        return world.create_unbacked_symint()
    source = ConstantSource(name)
    if name[1:].isdigit():
        world._generate_unique_id = lambda source_name: int(name[1:])
    if kind == "size":
        symbol = world.create_symbol(hint, source, _DYNAMIC, None, True)
    else:
        symbol = world.create_unspecified_symbol(hint, source, _DYNAMIC)
    return world.create_symintnode(symbol, hint=hint, source=source)


def known_hint(symbol: TorchValue, world: symbolic_shapes.ShapeEnv) -> int | None:
    """Return the value of the symbol at its creation; None for a symbol that is found while a program runs."""
    hint = world.backed_var_to_val.get(symbol)
    return None if hint is None else int(hint)


def _world(mode: FakeTensorMode) -> symbolic_shapes.ShapeEnv:
    assert mode.shape_env is not None
    return mode.shape_env


@contextmanager
def without_onednn() -> Generator[None]:
    """Disable oneDNN inside the context, since its LSTM has no backward pass on fake tensors.

    `torch.backends.mkldnn.flags` also sets other flags, and warns about that.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


PLAIN_INDICES: Mapping[str, Any] = {"constant_and_index_propagation": False}
"""Inductor's option that does not propagate constants and index expressions into indices.

torch 2.13 adds an inner loop step twice when it adds from a transposed tensor to indices computed from a count.
"""


def compile_graph(
    module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any], written: Sequence[int] = ()
) -> Callable[..., Any]:
    """Return the module compiled by Inductor for inputs like `examples`, which may be fake.

    `written` are the indices of the inputs that it writes to. Inductor is imported here, because the import takes
    seconds, which programs without kernels do not need.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Inductor's own imports
        from torch._inductor.compile_fx import compile_fx
    patches = {"fallback_random": True, **options}  # random numbers as in eager torch, in the same order
    made: TorchValue = compile_fx(module, list(examples), config_patches=patches)
    return _as_kernels_take_it(made, written)


def onednn_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the product of two float32 matrices by oneDNN, which `torch.mm` uses for narrower dtypes only."""
    return torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], "")


def has_onednn_product() -> bool:
    """True if this build of torch has oneDNN's matrix product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _as_kernels_take_it(call: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """Return a function that passes contiguous tensors to `call`, and plain tensors in the first call.

    In the first call, torch inspects custom operators. Written inputs that are not contiguous are copied back.
    """
    pending = [True]

    def run(*args: torch.Tensor) -> TorchValue:
        if not pending and all(map(torch.Tensor.is_contiguous, args)):
            return call(*args)
        rows = [x if x.is_contiguous() else x.contiguous() for x in args]
        if pending:
            pending.clear()
            rows = [x.as_subclass(torch.Tensor) for x in rows]
        found = call(*rows)
        for at in written:
            if not args[at].is_contiguous():
                args[at].copy_(rows[at])
        return found

    return run


def package_graph(module: fx.GraphModule, examples: Sequence[Any], path: str, options: Mapping[str, Any]) -> None:
    """Compile the module ahead of time for inputs like `examples`, into a file for `load_package`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Inductor's own imports
        from torch._inductor import aoti_compile_and_package

        exported = torch.export.export(module, tuple(examples))
        patches = {"fallback_random": True, **options}
        aoti_compile_and_package(exported, package_path=path, inductor_configs=patches)


def load_package(path: str) -> Callable[..., Any]:
    """Return the kernels in a file, as a function that returns a list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Inductor's own imports
        from torch._inductor import aoti_load_package

        return aoti_load_package(path)


def conditions(mode: FakeTensorMode) -> list[Any]:
    """Return the recorded guards as symbolic expressions, which must be true."""
    return [guard.expr for guard in _world(mode).guards]


def decided_outside(mode: FakeTensorMode) -> list[Any]:
    """Return the guards that were not added by implementations of torch operators, which accept any numbers."""
    known = [(guard.expr, guard.sloc.framework_loc) for guard in _world(mode).guards]
    return [expr for expr, place in known if "/torch/_" not in str(getattr(place, "filename", place))]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that the optimizer made a step: learning rate schedulers warn if they are called before the first step."""
    vars(optimizer)["_opt_called"] = True
