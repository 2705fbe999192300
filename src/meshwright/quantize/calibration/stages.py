"""The stages of a calibration: blocks of a model that run one after the other, and the inputs of each.

A chain is a `ModuleList` or `Sequential` whose modules pass their first argument on, as the layers of a transformer do.
Its modules are calibrated one by one. A model without a chain is one stage.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from meshwright.layout import TorchValue

from ..layers.linear_layers import Layers
from .batches import digest_of_tensor
from .one_device import Call, run_whole


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks of a chain in order, by name; `as_tuple` is True if they return tuples."""

    names: tuple[str, ...]
    as_tuple: bool

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.names]

    def with_output(self, result: TorchValue, call: Call) -> Call:
        """Return the call of the next block with the result of a block as its first argument."""
        args, kwargs = call
        return (result[0] if isinstance(result, tuple) else result, *args[1:]), kwargs


class _Passing(nn.Module):
    """A module in the place of a block: it records its call, and returns its first argument, or another value."""

    def __init__(self, block: nn.Module, as_tuple: bool, instead: Tensor | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)
        self.as_tuple, self.instead = as_tuple, instead
        self.seen: Call | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        value = args[0] if self.instead is None else self.instead
        return (value,) if self.as_tuple else value


@contextmanager
def put_in_place(model: nn.Module, new: Mapping[str, nn.Module]) -> Generator[None]:
    """Put modules in the place of those with the same names inside the block."""
    places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in new}
    before = {name: model.get_submodule(name) for name in new}
    try:
        for name, (parent, key) in places.items():
            parent._modules[key] = new[name]
        yield
    finally:
        for name, (parent, key) in places.items():
            parent._modules[key] = before[name]


def container_of(model: nn.Module, layers: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the modules in the list that holds most layers; of several such lists, the outermost."""
    names = list(layers)
    best: tuple[str, ...] = ()
    most = 1
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            prefix = f"{name}." if name else ""
            held = sum(layer.startswith(prefix) for layer in names)
            if len(module) > 1 and held > most:
                best, most = tuple(f"{prefix}{key}" for key in module._modules), held
    return best


def calls_of_blocks(
    model: nn.Module, chain: Chain, outside: Mapping[str, Tensor], call: Call, last: Tensor | None = None
) -> list[Call] | None:
    """Return the call of each block, where blocks pass their first argument on; None if they form no chain.

    With `last`, the last block returns this value instead.
    """
    blocks = chain.blocks(model)
    stand_ins = [_Passing(b, chain.as_tuple, last if b is blocks[-1] else None) for b in blocks]
    with put_in_place(model, dict(zip(chain.names, stand_ins, strict=True))):
        run_whole(model, outside, call)
    calls = [stand_in.seen for stand_in in stand_ins]
    found = [call for call in calls if call is not None and call[0] and isinstance(call[0][0], Tensor)]
    linked = len(found) == len(calls) and all(a[0][0] is b[0][0] for a, b in pairwise(found))
    return found if linked else None


def find_chain(
    model: nn.Module, layers: Layers, outside: Mapping[str, Tensor], first: Mapping[str, Tensor], call: Call
) -> Chain | None:
    """Return the chain of a model; None if its blocks do not pass their first argument on.

    `outside` is the state of the model without the blocks, and `first` that of the first block.
    """
    names = container_of(model, layers)
    for as_tuple in (False, True):
        chain = Chain(names, as_tuple)
        try:
            calls = calls_of_blocks(model, chain, outside, call)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            continue  # the model's code takes another kind of result
        if calls is not None and isinstance(run_whole(chain.blocks(model)[0], first, calls[0]), tuple) == as_tuple:
            return chain
    return None


def inside(name: str, layers: Layers) -> Sequence[str]:
    """Return the names of the layers that are the module `name`, or below it."""
    return [layer for layer in layers if not name or layer == name or layer.startswith(f"{name}.")]


def digest_of_stage(before: str, module: nn.Module, state: Mapping[str, Tensor], layers: Iterable[str]) -> str:
    """Return the digest of a stage and of those before it: layers, classes, settings, and every bit of the state.

    It is the same on every mesh, and in another process.
    """
    settings = [[name, type(inner).__name__, *_settings(inner)] for name, inner in module.named_modules()]
    tensors = [[name, digest_of_tensor(x)] for name, x in state.items()]
    return sha256(json.dumps([before, list(layers), settings, tensors]).encode()).hexdigest()


def _settings(module: nn.Module) -> list[tuple[str, str]]:
    """Return the public attributes of a module that are plain values, such as `eps`."""
    public = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
    return sorted((name, repr(value)) for name, value in public.items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return all(isinstance(item, plain) for item in value) if isinstance(value, tuple) else isinstance(value, plain)
