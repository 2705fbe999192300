"""Arguments of a call as a tree: tensors at the leaves, everything else around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with every tensor in lists, tuples, dicts and slices replaced by `fn` of it."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return _rebuild(tree, [map_tensors(fn, v) for v in tree])
    if isinstance(tree, dict):
        return {k: map_tensors(fn, v) for k, v in tree.items()}
    if isinstance(tree, slice):
        return slice(map_tensors(fn, tree.start), map_tensors(fn, tree.stop), map_tensors(fn, tree.step))
    return tree


def _rebuild(old: Any, items: list[Any]) -> Any:
    if type(old) is list:
        return items
    if type(old) is tuple:
        return tuple(items)
    if hasattr(old, "_fields"):
        return type(old)(*items)
    return type(old)(items)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, slice):
        yield from tensors_in((tree.start, tree.stop, tree.step))
