"""Calls that return their argument itself on one device return it in every layout, also if some ranks hold no elements.

`y = x.float()` of a float32 leaf is the leaf: its gradient is `x.grad`, and a write to it is a write to `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

import meshwright as mw

ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "": lambda x: (),
    "dtype": lambda x: (x.dtype,),
    "device": lambda x: (x.device,),
    "device name": lambda x: (str(x.device),),
    "itself": lambda x: (x,),
    "shape": lambda x: (x.shape,),
    "sizes": lambda x: tuple(x.shape),
    "strides": lambda x: (x.shape, x.stride()),
    "first dim": lambda x: (0,),
    "last dim": lambda x: (-1,),
    "two dims": lambda x: (0, -1),
    "same dim": lambda x: (0, 0),
}
"""Arguments with values that the tensor already has."""

SKIPPED = ("backward", "share_memory_", "apply_", "map_", "map2_", "resize_", "set_", "index")
"""Methods that do not compute numbers, or that need a function."""
LAYOUTS: list[tuple[tuple[int, ...], int, Any]] = [
    ((1, 6), 2, mw.Shard(0)),
    ((5, 1), 3, mw.Shard(1)),
    ((1,), 2, mw.Shard(0)),
    ((1, 1), 2, mw.Shard(1)),
    ((2, 1, 3), 2, mw.Shard(1)),
    ((2, 3), 3, mw.Shard(0)),
    ((0, 3), 2, mw.Shard(0)),
    ((), 2, mw.Replicate()),
    ((1, 6), 1, mw.Shard(0)),
]
Outcome = list[int]
"""One number for each result that is a tensor: 1 if it is the argument itself, 2 if it shares its memory, else 0."""


def _calls() -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Yield the attributes and methods of tensors, and the functions of torch, each with all arguments."""
    for name, member in _members():
        if name in SKIPPED or name.startswith(("_", "unsafe_")):  # `unsafe_` pieces may share memory or not
            continue
        if not callable(member):
            yield name, lambda x, n=name: getattr(x, n)
            continue
        for text, arguments in ARGUMENTS.items():
            yield f"{member.__qualname__}({text})", lambda x, f=member, a=arguments: f(x, *a(x))


def _members() -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(Tensor, name)) for name in dir(Tensor))
    functions = get_overridable_functions()
    yield from ((f.__name__, f) for owner in (torch, torch.nn.functional) for f in functions[owner])


def _number(x: Tensor, r: Any) -> int:
    return 1 if r is x else 2 if isinstance(r, Tensor) and _shares(x, r) else 0


def _shares(x: Tensor, r: Tensor) -> bool:
    if r.layout is not torch.strided or r.is_quantized or r.is_meta or not r.numel():
        return False
    with torch.no_grad():
        before = r.detach().clone()
        x.data.add_(1)
        after = r.detach().clone()
        x.data.sub_(1)
    return bool(((before != after) & (before == before)).any())  # a result of NaN shares nothing


def _outcome(call: Callable[[Tensor], Any], x: Tensor) -> Outcome | None:
    """Return None for a call that raises an error."""
    try:
        out = call(x)
        return [_number(x, r) for r in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(r, Tensor)]
    except Exception:
        return None


def _numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def _aliasing(shape: tuple[int, ...]) -> dict[str, tuple[Callable[[Tensor], Any], Outcome]]:
    """Return the calls that return their argument or its memory on one device, with their outcomes."""
    found = ((name, call, _outcome(call, _numbers(shape))) for name, call in _calls())
    return {name: (call, out) for name, call, out in found if out and any(out)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "ranks", "placement"), LAYOUTS)
def test_a_call_returns_its_argument_if_one_device_does(shape: tuple[int, ...], ranks: int, placement: Any) -> None:
    known = _aliasing(shape)
    assert len(known) > 200

    def program() -> list[str]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        wrong: list[str] = []
        for name, (call, expected) in known.items():
            found = _outcome(call, mw.shard_tensor(_numbers(shape), mesh, [placement]))
            if found != expected:
                wrong.append(f"{name}: {found}, not {expected}")
        return wrong

    assert mw.simulate(program, ranks)[0] == []


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.float64),
    "double": lambda x: x.double(),
    "type_as": lambda x: x.type_as(x),
    "real": lambda x: x.real,
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[0],
    "contiguous": lambda x: x.contiguous(),
    "dropout of nothing": lambda x: torch.nn.functional.dropout(x, 0.0),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(("shape", "ranks", "placement"), LAYOUTS)
def test_the_gradient_of_a_leaf_that_a_call_returns_is_that_of_the_leaf(
    shape: tuple[int, ...], ranks: int, placement: Any, cast: str
) -> None:
    def program() -> float:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        x = mw.shard_tensor(_numbers(shape).double(), mesh, [placement]).requires_grad_()
        y = CASTS[cast](x)
        (y * 2).sum().backward()
        assert y.is_leaf
        assert x.grad is not None
        return x.grad.sum().item()

    assert mw.simulate(program, ranks) == [2.0 * torch.Size(shape).numel()] * ranks
