"""The private torch names of function transforms and TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch._functorch import eager_transforms
from torch._functorch import vmap as functorch_vmap
from torch.jit import _recursive
from torch.utils._pytree import tree_map

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction

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


SCRIPTED = (torch.jit.ScriptFunction, torch.ScriptMethod)
"""Functions of TorchScript."""
