"""AWQ: the error that rounded weights of a group of layers make, in the results of the module around the layers.

The module is the smallest one that contains all layers of the group, such as attention for q, k and v: errors of q and
k count by what they change in the result of attention, and not by their own size (Lin et al. 2023, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from meshwright.layout import TorchValue

from .._scheme import NumberFormat
from .one_device import Call, run_whole, squared
from .smoothing import rounded

Seen = dict[str, list[tuple[Call, TorchValue]]]
"""Name of a module → its calls, with their results."""


def around(names: Sequence[str]) -> list[str]:
    """Return the names of the modules that contain all of these, or that all of these are, the smallest first.

    >>> around(["attention.q", "attention.k"]), around(["mlp.down"])
    (['attention', ''], ['mlp.down', 'mlp', ''])
    """
    parts = [name.split(".") if name else [] for name in names]
    shared = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))]
    return [".".join(shared[:count]) for count in range(len(shared), -1, -1)]


def errors(
    module: nn.Module,
    state: Mapping[str, Tensor],
    names: Sequence[str],
    call: Call,
    choices: Sequence[Tensor],
    numbers: NumberFormat,
) -> list[float]:
    """Return the squared error that the weights of layers make if they are rounded, for each choice of factors.

    `module` is the stage with its `state`, `names` are the layers inside, and `call` is a call of the stage.
    """
    seen = _calls_of_modules(module, state, around(names), call)
    at = next(name for name in around(names) if len(seen[name]) == 1)  # a list of modules is never called
    prefix = f"{at}." if at else ""
    own = {name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}
    weights = [f"{name}.weight"[len(prefix) :] if name != at else "weight" for name in names]
    inner, (inner_call, exact) = module.get_submodule(at), seen[at][0]
    found: list[float] = []
    for factors in choices:
        trial = own | {name: rounded(own[name], factors, numbers) for name in weights}
        found.append(squared(exact, run_whole(inner, trial, inner_call)))
    return found


def _calls_of_modules(module: nn.Module, state: Mapping[str, Tensor], names: Sequence[str], call: Call) -> Seen:
    """Run a module, and return the calls of the modules inside with these names."""
    seen: Seen = {name: [] for name in names}
    hooks = [
        module.get_submodule(name).register_forward_hook(partial(_note, seen[name]), with_kwargs=True) for name in seen
    ]
    try:
        run_whole(module, state, call)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _note(
    seen: list[tuple[Call, TorchValue]], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: TorchValue
) -> None:
    seen.append(((args, kwargs), result))
