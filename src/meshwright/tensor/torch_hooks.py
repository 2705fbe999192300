"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import local
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import (
    OpOverload,
    _len_torch_dispatch_stack_pre_dispatch,
    _pop_mode_from_pre_dispatch,
    _set_mode_pre_dispatch,
)
from torch._subclasses import fake_tensor
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import _default_meta_extractor

Operator = OpOverload
"""An ATen operator overload; its class and `_schema` have no public name."""

FakeTensor: type[torch.Tensor] = fake_tensor.FakeTensor
"""A tensor with a shape, a dtype and a device that holds nothing."""

call_plain: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""`call_plain(func, types, args, kwargs)` calls with interception off; cheaper than a `with` block."""

no_interception = torch._C.DisableTorchFunctionSubclass
"""Context in which DistTensors behave as the local tensors that they are."""

interception: Any = getattr(torch._C, "_EnableTorchFunction")  # noqa: B009 - not in torch's stubs
"""Context in which DistTensors are the whole tensors again, inside of `no_interception`."""

interception_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""False inside `no_interception` and `call_plain`, where a DistTensor is to behave as its local part."""

backward_running: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread is in, -1 outside of one."""

same_kind: Callable[[torch.Tensor, torch.Tensor], bool] = getattr(torch, "_has_compatible_shallow_copy_type")  # noqa: B009 - not in torch's stubs
"""What `nn.Module.to` asks before it puts a parameter's new data in the place of the old."""

unscale: Callable[..., None] = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_")  # noqa: B009 - not in torch's stubs
"""What a gradient scaler calls on all gradients at once."""

seeded_tag = torch.Tag.nondeterministic_seeded
"""Tag of the operators that draw from a random generator."""


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the Python around it that looks for functorch transforms, which run on whole tensors."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue] - of its base in C


class _Told:
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        told: Any = __class__  # of the function that has this code: torch.autograd.Function
        return told.meshwright_told(cls, args, kwargs)


def tell_functions(apply: Callable[..., Any], untold: Callable[[Any], None]) -> None:
    """From now on `F.apply(*args, **kwargs)` of an autograd function is `apply(F, its own apply, args, kwargs)`.

    Nothing else tells that operators belong to a function with a backward pass of its own: torch hands that one local
    gradients, and asks no tensor. Where torch has `apply` in Python its code is exchanged, so that what was named
    before (`swish = Swish.apply`) tells, too. Where it is in C, calls by such a name are `untold(F)`.
    """
    function: Any = torch.autograd.Function
    member = function.__dict__["apply"]
    python: Any = getattr(member, "__func__", None)
    if python is None:  # torch 2.15 has it in C
        own = partial(_told, member)
        function.apply = classmethod(_by_name)
        for early in _below(function):
            early.forward = _forward_of(early, early.forward, untold)
    else:
        kept = python.__code__, python.__globals__, python.__name__, python.__defaults__, python.__closure__
        own = partial(MethodType, FunctionType(*kept))
        told = _Told.__dict__["apply"].__func__.__code__
        python.__code__ = told.replace(co_filename=python.__code__.co_filename)  # by which torch.compile knows it
    function.meshwright_told = staticmethod(lambda cls, args, kwargs: apply(cls, own(cls), args, kwargs))


def _by_name(cls: Any, *args: Any, **kwargs: Any) -> Any:
    told: Any = torch.autograd.Function
    return told.meshwright_told(cls, args, kwargs)


_by_name.__name__ = "apply"  # by which torch.compile knows it
_TELLING = local()


def _told(member: Any, function: Any) -> Callable[..., Any]:
    """What `F.apply` is, whose forward function finds that the call was told."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_TELLING, "on", False)
        _TELLING.on = True
        try:
            return member.__get__(None, function)(*args, **kwargs)
        finally:
            _TELLING.on = before

    return call


def _forward_of(function: Any, own: Callable[..., Any], untold: Callable[[Any], None]) -> Any:
    """The forward function of a class, which tells of calls that came to it by no name that tells."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not getattr(_TELLING, "on", False):
            untold(function)
        return own(*args, **kwargs)

    return staticmethod(forward)


def _below(function: Any) -> list[Any]:
    """The classes of that class with a forward function of their own."""
    below = [c for sub in function.__subclasses__() for c in (sub, *_below(sub))]
    return [c for c in dict.fromkeys(below) if "forward" in vars(c)]


TRANSFORMS: set[str] = set()
"""How transforms of `torch.func` were begun in this process: to ask whether one is at work takes time."""

transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside a transform of `torch.func`, in this thread."""

transforms_paused = temporarily_clear_interpreter_stack
"""Context in which tensors are computed as they are outside of all transforms."""


def forward_mode() -> bool:
    """True while some thread of this process computes derivatives in forward mode."""
    return forward_ad._current_level >= 0


_INTO = {
    eager_transforms: ("_wrap_for_grad", "_wrap_functional_tensor"),
    functorch_vmap: ("_add_batch_dim", "_remove_batch_dim"),
}
"""What takes a tensor into a transform, or out of it: torch takes the part for the whole there, and asks no tensor."""
_BEGIN = {
    eager_transforms: ("_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting"),
    functorch_vmap: ("_vmap_increment_nesting",),
}
"""What begins a transform."""


def tell_transforms(entering: Callable[[Any], Any]) -> None:
    """From now on a transform of `torch.func` takes in `entering(x)` for `x`; in forward mode, before that begins."""

    def taking(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest: own(entering(x), *rest)

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any) -> Any:
            TRANSFORMS.add(name)
            return own(*args)

        return begin

    forward = eager_transforms._jvp_with_argnums

    def forward_of(func: Any, primals: Any, tangents: Any, *rest: Any, **how: Any) -> Any:
        primals, tangents = tree_map(entering, (primals, tangents))
        return forward(func, primals, tangents, *rest, **how)

    backward = eager_transforms._autograd_grad

    def backward_of(outputs: Any, inputs: Any, seeds: Any = None, *rest: Any, **how: Any) -> Any:
        return backward(outputs, inputs, tree_map(entering, seeds), *rest, **how)

    given: dict[str, Any] = {"_jvp_with_argnums": forward_of, "_autograd_grad": backward_of}
    eager_transforms.__dict__.update(given)
    for module, names in _INTO.items():
        for name in names:
            setattr(module, name, taking(getattr(module, name)))
    for module, names in _BEGIN.items():
        for name in names:
            setattr(module, name, noting(name, getattr(module, name)))


_META_EXTRACTOR = _default_meta_extractor.__code__
"""What `torch.utils.checkpoint` compares recomputed tensors by."""


def checkpoint_compares() -> bool:
    """True when the caller's caller is the check of `torch.utils.checkpoint` that recomputing gave the same shapes.

    It noted the shapes of local tensors in the forward pass, where interception was off, and asks again here.
    """
    return backward_running() != -1 and sys._getframe(2).f_code is _META_EXTRACTOR


def view_replay() -> Any:
    """Context in which autograd repeats views as they were made, instead of by `as_strided`.

    The gradient of `as_strided` on an empty tensor is a constant: a rank without a piece would drop out of the second
    derivative, and of the collectives in it.
    """
    return _force_original_view_tracking(True)


def run_backward(
    outputs: list[torch.Tensor], seeds: list[Any], keep: bool, create: bool, inputs: tuple[Any, ...], **how: Any
) -> tuple[Any, ...]:
    """The autograd engine itself: the public doors would ask the distributed tensors among `inputs` first."""
    if not create:
        return _engine_run_backward(tuple(outputs), tuple(seeds), keep, create, inputs, **how)
    with view_replay():
        return _engine_run_backward(tuple(outputs), tuple(seeds), keep, create, inputs, **how)


Run = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]


def grouped_product(
    x: torch.Tensor, w: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The product of groups on the meta device: torch's own refuses all dtypes but bfloat16, its kernels do not."""
    del bias
    batch = () if x.dim() != w.dim() else (x.shape[0],) if x.dim() == 3 else (offs.shape[0],)
    return torch.empty((*batch, x.shape[-2], w.shape[-1]), dtype=out_dtype or x.dtype, device=x.device)


def _plainly(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op is torch.ops.aten._grouped_mm.default and args[0].is_meta:
        return grouped_product(*args, **kwargs)
    return op(*args, **kwargs)


class _Recorder(SchemaCheckMode):
    """Sees every operator before autograd and before composite operators are taken apart.

    torch admits three kinds of modes at that level; the one for checking schemas is the only one that may stand alone.
    """

    def __init__(self, note: Callable[[Operator, tuple[Any, ...], dict[str, Any], Any], None], run: Run) -> None:
        self.note, self.run = note, run
        self._dispatch_key = torch._C.DispatchKey.PreDispatch  # where it is put back after `no_modes`

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        self.note(func, args, kwargs or {}, out)
        return out


@contextmanager
def imagining(sizes: Iterable[Any], always: bool = False) -> Generator[None]:
    """Inside, tensors are fake ones where some of the sizes are symbolic: plain meta tensors would pin those down.

    With `always`, in any case: fake tensors have a device, and so autocast does to them what it does to real ones.
    """
    env = next((n.node.shape_env for n in sizes if isinstance(n, torch.SymInt)), None)
    fake = always or env is not None
    with fake_tensor.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) if fake else nullcontext():
        yield


@contextmanager
def operators_recorded(
    note: Callable[[Operator, tuple[Any, ...], dict[str, Any], Any], None], run: Run = _plainly
) -> Generator[None]:
    """Inside, `note` is told every ATen operator that is called, as it is before autograd; `run` carries it out."""
    _set_mode_pre_dispatch(_Recorder(note, run))
    try:
        with torch._C._EnablePythonDispatcher(), torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        _pop_mode_from_pre_dispatch()


def parameters_of(op: Operator, without: Container[str] = ()) -> list[tuple[str, str]]:
    """Names and types of an operator's arguments: what two overloads share that take the same call."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]


def positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; those that an operator is given by name, in the places that its schema gives them."""
    if not kwargs or not isinstance(func, Operator):
        return args, kwargs
    left = dict(kwargs)
    for a in func._schema.arguments[len(args) :]:
        if a.kwarg_only or a.name not in left:
            break
        args = (*args, left.pop(a.name))
    return args, left


def written_arguments(op: Operator) -> list[Any]:
    """The arguments that an operator's schema marks as written."""
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def composite_kernel(op: Operator) -> Callable[..., Any] | None:
    """What torch makes a composite operator of, in C++; None for an operator that has kernels of its own."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if op.namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return None
    return partial(op._op_dk, key)


def list_kernel(op: Operator) -> Callable[..., Any] | None:
    """torch's loop over the entries of the lists that a `_foreach_` operator takes; None for another operator."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    is_loop = op.namespace == "aten" and op._schema.name.startswith("aten::_foreach_")
    if not is_loop or not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return None
    return partial(op._op_dk, key)


def modes_before_dispatch() -> bool:
    """True while a mode sees operators before autograd: no other one can be put beside it."""
    return _len_torch_dispatch_stack_pre_dispatch() > 0


no_modes: Any = _disable_current_modes
"""Context in which no mode sees what is called: what is done to plan a call is no part of the caller's program."""


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when `a` and `b` look at the same memory."""
    return bool(getattr(torch._C, "_is_alias_of")(a, b))  # noqa: B009 - not in torch's stubs
