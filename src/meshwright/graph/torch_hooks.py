"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from meshwright.tensor import grouped_product

Operator = OpOverload
"""An ATen operator overload; its class and `_schema` have no public name."""

FakeMode = FakeTensorMode
"""Tensors that have a shape, a dtype and a device, and hold nothing."""

with FakeTensorMode():  # torch 2.11 sets a guard in the first one, and crashes where two threads do so at once
    pass

FakeTensor: type[torch.Tensor] = fake_tensor.FakeTensor
"""A tensor that has a shape, a dtype and a device, and holds nothing."""


def forget_numbers(x: Any) -> None:
    """Make a fake tensor that knows its numbers one that does not."""
    x.constant = None


DataDependent = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    symbolic_shapes.GuardOnDataDependentSymNode,
)
"""What fake tensors raise when Python asks for their numbers."""

interception_off: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which distributed tensors are the parts that they are."""

unrecorded: Any = _disable_current_modes
"""Context in which what is called is no part of the program that is being recorded."""

no_modes: Any = _disable_current_modes
"""Context in which no dispatch mode of the caller sees what is called."""


def modes_on() -> tuple[Any, ...]:
    """Return the function modes and dispatch modes that this thread is in, outermost first."""
    return (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())


def dispatch_modes() -> tuple[Any, ...]:
    """Return the dispatch modes that this thread is in."""
    return tuple(_get_current_dispatch_mode_stack())


_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - not in torch's stubs


def backward_hooks_of_all() -> list[Mapping[int, Any]]:
    """Return torch's tables of backward hooks that every layer calls."""
    return [nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks]


def saving_is_hooked() -> bool:
    """True inside `torch.autograd.graph.saved_tensors_hooks`."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


_FAKE_KERNELS: Any = fake_impls.op_implementations_dict
"""Operator → its kernel on fake tensors, where that of the meta device will not do."""


def _grouped(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The product of groups on fake tensors, which torch's own kernel refuses as on the meta device."""
    with mode:
        return grouped_product(*args, **kwargs)


_FAKE_KERNELS.setdefault(torch.ops.aten._grouped_mm.default, _grouped)


def _flags_of_backends() -> list[Callable[[], Any]]:
    """Return functions that read the flags of torch.backends."""
    found: list[Callable[[], Any]] = []
    for module in vars(torch.backends).values():
        found += [partial(getattr, module, name) for name, flag in vars(type(module)).items() if type(flag) is _Flag]
    sdp = torch.backends.cuda
    kinds = (sdp.flash_sdp_enabled, sdp.mem_efficient_sdp_enabled, sdp.math_sdp_enabled, sdp.cudnn_sdp_enabled)
    return [*found, *kinds]


_Flag: Any = getattr(torch.backends, "ContextProp", None)
_FLAGS: list[Callable[[], Any]] = _flags_of_backends()


def backend_flags() -> tuple[Any, ...]:
    """Return the values of all flags of torch.backends."""
    return tuple(flag() for flag in _FLAGS)


_FAILURES_TOLD: ContextVar[bool] = ContextVar("failures_told", default=False)
fake_tensor.log.addFilter(lambda record: record.levelno < logging.ERROR or not _FAILURES_TOLD.get())


@contextmanager
def failures_told() -> Generator[None]:
    """Inside, torch's log leaves out what fails on fake tensors: it would print the error beside the one raised."""
    token = _FAILURES_TOLD.set(True)
    try:
        yield
    finally:
        _FAILURES_TOLD.reset(token)


@contextmanager
def imagining(mode: FakeTensorMode) -> Generator[FakeTensorMode]:
    """Inside, tensors that are made are fake ones of `mode`."""
    with mode:
        yield mode


def memory_of(x: torch.Tensor) -> Any:
    """What two tensors share when they look at the same memory; also of tensors that hold nothing."""
    return x.untyped_storage()._cdata


def faked(mode: FakeMode, x: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor that looks like `x`; `x` itself if it is one."""
    if isinstance(x, FakeTensor):
        return x
    with mode:
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)


next_gradient_number: Callable[[], int] = import_module("torch._C._autograd")._get_sequence_nr
"""Number that the next autograd node of this thread gets."""


def running_gradient_number() -> int | None:
    """Number of the autograd node whose backward function runs, None outside of any."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


Modes = TorchDispatchMode
"""Base of what sees every operator below autograd."""

ShapeEnv = symbolic_shapes.ShapeEnv
"""Where symbolic numbers live; with one, `.item()` of a fake tensor is a symbol."""

_earlier: WeakSet[symbolic_shapes.ShapeEnv] = WeakSet()
"""Where symbolic numbers of recordings live, as long as anything holds them."""
_MOST_FAKE_RESULTS = 1 << 14
"""Results on fake tensors that torch may remember; it has no bound of its own."""


def new_sizes(**options: Any) -> symbolic_shapes.ShapeEnv:
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
"""Each symbol has a source of its own, by which torch knows it."""


def symbolic_float(mode: FakeTensorMode, name: str, hint: float) -> Any:
    """A float that is not known yet, in the world of `mode`."""
    env, source = _world(mode), ConstantSource(f"{name}_{next(_numbers)}")
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def symbolic_int(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """An integer that is not known yet, in the world of `mode`."""
    env, source = _world(mode), ConstantSource(f"{name}_{next(_numbers)}")
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


def symbolic_count(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """A number above 0 that is not known yet, in the world of `mode`: powers of it need not ask."""
    env, source = _world(mode), ConstantSource(f"{name}_{next(_numbers)}")
    symbol = env.create_symbol(hint, source, symbolic_shapes.DimDynamic.DYNAMIC, None, True, True)
    return env.create_symintnode(symbol, hint=hint, source=source)


def symbolic_size(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """A size of two or more that is not known yet, in the world of `mode`."""
    env, source = _world(mode), ConstantSource(f"{name}_{next(_numbers)}")
    symbol = env.create_symbol(hint, source, symbolic_shapes.DimDynamic.DYNAMIC, None, True)
    return env.create_symintnode(symbol, hint=hint, source=source)


def named_symbol(world: symbolic_shapes.ShapeEnv, name: str, kind: str, hint: int) -> Any:
    """A symbol of this name: a "size" of two or more, a "number", or one that is "found" while a program runs.

    torch makes a symbol's number of its source; here it is the one in the name, where that has one.
    """
    if kind == "found":
        return world.create_unbacked_symint()
    source = ConstantSource(name)
    if name[1:].isdigit():
        world._generate_unique_id = lambda source_name: int(name[1:])
    dynamic = symbolic_shapes.DimDynamic.DYNAMIC
    if kind == "size":
        symbol = world.create_symbol(hint, source, dynamic, None, True)
    else:
        symbol = world.create_unspecified_symbol(hint, source, dynamic)
    return world.create_symintnode(symbol, hint=hint, source=source)


def known_hint(symbol: Any, world: symbolic_shapes.ShapeEnv) -> int | None:
    """What the symbol was when it was made; None for one that is found while a program runs."""
    hint = world.backed_var_to_val.get(symbol)
    return None if hint is None else int(hint)


def _world(mode: FakeTensorMode) -> symbolic_shapes.ShapeEnv:
    assert mode.shape_env is not None
    return mode.shape_env


@contextmanager
def without_onednn() -> Generator[None]:
    """Inside, torch does not choose oneDNN's LSTM, which has no backward on fake tensors.

    `torch.backends.mkldnn.flags` sets more than it is told, and warns of that.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


PLAIN_INDICES: Mapping[str, Any] = {"constant_and_index_propagation": False}
"""Inductor's option that keeps numbers which indices are computed of out of the indices themselves.

torch 2.13 adds a step of the inner loop twice where it adds to places computed from a count, from a transposed tensor.
"""


def compile_graph(
    module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any], written: Sequence[int] = ()
) -> Callable[..., Any]:
    """The module's kernels, made by Inductor for inputs like `examples`, which may be fake.

    `written` are the inputs that it writes to, by number.
    Inductor is imported here: it takes seconds, which a program that is run as it is does not spend.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what Inductor itself imports
        from torch._inductor.compile_fx import compile_fx
    patches = {"fallback_random": True, **options}  # drawing as torch does, in its order
    made: Any = compile_fx(module, list(examples), config_patches=patches)
    return _as_kernels_take_it(made, written)


def onednn_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The product of two float32 matrices by oneDNN, which `torch.mm` asks for narrower dtypes only."""
    return torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], "")


def has_onednn_product() -> bool:
    """Whether this torch brings it along."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _as_kernels_take_it(call: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """`call` with tensors row by row, and plain ones in its first run: there torch watches own operators."""
    pending = [True]

    def run(*args: Any) -> Any:
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
    """Writes the module's kernels, made ahead of time for inputs like `examples`: a file for `load_package`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Inductor itself imports
        from torch._inductor import aoti_compile_and_package

        exported = torch.export.export(module, tuple(examples))
        patches = {"fallback_random": True, **options}
        aoti_compile_and_package(exported, package_path=path, inductor_configs=patches)


def load_package(path: str) -> Callable[..., Any]:
    """The kernels in a file: a function that gives a list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Inductor itself imports
        from torch._inductor import aoti_load_package

        return aoti_load_package(path)


def conditions(mode: FakeTensorMode) -> list[Any]:
    """What was decided by the sizes that were seen, as symbolic expressions that must be true."""
    return [guard.expr for guard in _world(mode).guards]


def decided_outside(mode: FakeTensorMode) -> list[Any]:
    """The conditions that no implementation of an operator, on tensors or on numbers, asked for: those take any."""
    known = [(guard.expr, guard.sloc.framework_loc) for guard in _world(mode).guards]
    return [expr for expr, place in known if "/torch/_" not in str(getattr(place, "filename", place))]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tells schedules of learning rates that a step was made: they warn where they are called before the first one."""
    vars(optimizer)["_opt_called"] = True
