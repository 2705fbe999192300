"""Inference of shapes and dtypes of an operator's results, by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..torch_hooks import FakeMode, Operator, ShapeEnv, imagining, no_modes
from .node import Conversion, Op, Overwrite, Start, Value, Wait, WriteToCopies, map_values, values_in


class FreshNames:
    """Generator of names that none of the given values has."""

    def __init__(self, values: Iterable[Value] = ()) -> None:
        self._taken = {v.name for v in values}
        self._next: dict[str, Iterator[int]] = {}

    def fresh(self, stem: str) -> str:
        """Return the first unused name of `stem`, `stem_1`, `stem_2` and so on."""
        if stem not in self._taken:
            self._taken.add(stem)
            return stem
        numbers = self._next.setdefault(stem, count(1))
        name = next(name for n in numbers if (name := f"{stem}_{n}") not in self._taken)
        self._taken.add(name)
        return name


def infer(
    op: Op,
    args: TorchValue,
    kwargs: Mapping[str, TorchValue],
    rank: int,
    names: FreshNames,
    mode: FakeMode | None = None,
) -> TorchValue:
    """Return values with fresh names, in the same structure as the result of `op`."""
    if isinstance(op, Conversion):
        (x,) = values_in(args)
        return Value(names.fresh(stem_of(op)), op.dst.local_shape(rank), x.dtype, x.device)
    if isinstance(op, (Start, Wait)):
        x = next(values_in(args))
        shape = op.carry.dst.local_shape(rank) if isinstance(op, Start) else x.shape
        return Value(names.fresh(stem_of(op)), shape, x.dtype, x.device)
    with no_modes(), imagining(mode or FakeMode(shape_env=world_of(args))), torch.no_grad():
        real_args, real_kwargs = map_values(fake_argument, (args, dict(kwargs)))
        out = op(*real_args, **real_kwargs)
    return as_values(out, lambda: names.fresh(stem_of(op)))


def world_of(args: TorchValue) -> ShapeEnv:
    """Return the ShapeEnv of the arguments' symbolic sizes, or a new one."""
    sizes = (n for v in values_in(args) for n in v.shape)
    return next((n.node.shape_env for n in sizes if isinstance(n, torch.SymInt)), None) or ShapeEnv()


def fake_argument(v: Value) -> TorchValue:
    if not isinstance(v.dtype, torch.dtype):
        return v.dtype(2)
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def as_values(out: TorchValue, name: Callable[[], str]) -> TorchValue:
    """Return `out` with its tensors and numbers replaced by values."""
    if isinstance(out, Tensor):
        return Value.of(name(), out)
    if isinstance(out, (tuple, list)):
        items = [as_values(v, name) for v in out]
        return items if type(out) is list else tuple(items)
    if isinstance(out, Mapping):
        return {k: as_values(v, name) for k, v in out.items()}
    if isinstance(out, (bool, torch.SymBool)):
        return Value(name(), (), bool)
    if isinstance(out, (int, torch.SymInt)):
        return Value(name(), (), int)
    if isinstance(out, (float, torch.SymFloat)):
        return Value(name(), (), float)
    return out


def stem_of(op: Op) -> str:
    """Return the stem of the names for results of `op`."""
    if isinstance(op, Conversion):
        name = type(op.step).__name__
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")
    if isinstance(op, (Start, Wait)):
        return stem_of(op.carry) + ("_started" if isinstance(op, Start) else "")
    if isinstance(op, (WriteToCopies, Overwrite)):
        return stem_of(op.op)
    if isinstance(op, Operator):
        return op._schema.name.split("::")[1].strip("_")
    return getattr(op, "__name__", type(op).__name__).strip("_").lower()
