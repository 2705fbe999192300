"""Inference of shapes and dtypes of an operator's results, by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import count

import torch
from torch import Tensor

from meshwright.layout import Cache, TorchValue

from ..torch_hooks import FakeMode, Operator, ShapeEnv, imagining, is_autocast_on, no_modes
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


def infer(op: Op, args: TorchValue, kwargs: Mapping[str, TorchValue], rank: int, names: FreshNames) -> TorchValue:
    """Return values with fresh names, in the same structure as the result of `op`.

    Results of torch's own operators are cached by the types of the arguments, since a run on fake tensors takes a
    millisecond.
    """
    if isinstance(op, Conversion):
        (x,) = values_in(args)
        return Value(names.fresh(stem_of(op)), op.dst.local_shape(rank), x.dtype, x.device)
    if isinstance(op, (Start, Wait)):
        x = next(values_in(args))
        shape = op.carry.dst.local_shape(rank) if isinstance(op, Start) else x.shape
        return Value(names.fresh(stem_of(op)), shape, x.dtype, x.device)

    def fresh() -> str:
        return names.fresh(stem_of(op))

    key = _cache_key(op, args, kwargs)
    known = None if key is None else _INFERRED.get(key)
    if known is not None:
        return map_values(lambda v: Value(fresh(), v.shape, v.dtype, v.device), known)
    found = as_values(_run_on_fake_tensors(op, args, kwargs), fresh)
    if key is not None and all(map(_has_known_sizes, values_in(found))):
        _INFERRED[key] = found
    return found


_INFERRED: Cache[Hashable, TorchValue] = Cache(8192)
"""Operator and types of its arguments → the values of an earlier call."""


def _run_on_fake_tensors(
    op: Callable[..., TorchValue], args: TorchValue, kwargs: Mapping[str, TorchValue]
) -> TorchValue:
    with no_modes(), imagining(FakeMode(shape_env=world_of(args))), torch.no_grad():
        fake_args, fake_kwargs = map_values(fake_argument, (args, dict(kwargs)))
        return op(*fake_args, **fake_kwargs)


def _cache_key(op: Op, args: TorchValue, kwargs: Mapping[str, TorchValue]) -> Hashable | None:
    """Return all that determines the types of the results; None for an operator of a user, and for symbolic sizes."""
    operator = op.op if isinstance(op, (WriteToCopies, Overwrite)) else op
    if not isinstance(operator, Operator) or operator.namespace not in _NAMESPACES or is_autocast_on():
        return None
    given = _described((args, dict(kwargs)))
    return None if given is None else (op, given, torch.get_default_dtype())


_NAMESPACES = frozenset({"aten", "prims"})
_COMPARABLE = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _has_known_sizes(v: Value) -> bool:
    return all(type(n) is int for n in v.shape)


def _described(tree: TorchValue) -> Hashable | None:
    """Return the types of the values, and the other arguments; None if an argument cannot be compared."""
    if isinstance(tree, Value):
        return (Value, tree.shape, tree.dtype, tree.device) if _has_known_sizes(tree) else None
    if tree is None or type(tree) in _COMPARABLE:
        return type(tree), tree
    if type(tree) is dict:
        tree = tuple(tree.items())
    if type(tree) not in (tuple, list):
        return None
    parts = tuple(map(_described, tree))
    return None if None in parts else (type(tree), parts)


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
