"""Trees of arguments, batches and results: lists, tuples, mappings and slices, with leaves in them.

A dataclass, a module and None are leaves. A named tuple is a tuple, and an output of a transformers model is a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from copy import copy
from functools import lru_cache

from torch import Tensor

from meshwright.layout import TorchValue

_LEAF, _TENSOR, _SEQUENCE, _MAPPING, _SLICE = range(5)
"""Kinds of values in a tree. Members of an Enum would be slower to look up."""


@lru_cache(maxsize=4096)
def _kind_of(cls: type) -> int:
    """Return what values of a class are in a tree. Memoized, because the test for a mapping is slow."""
    if issubclass(cls, Tensor):
        return _TENSOR
    if issubclass(cls, (list, tuple)):
        return _SEQUENCE
    if issubclass(cls, Mapping):
        return _MAPPING
    return _SLICE if issubclass(cls, slice) else _LEAF


def leaves_in(tree: object) -> Iterator[TorchValue]:
    """Return every leaf of `tree`, in order: tensors, None, and all other values.

    >>> list(leaves_in(({"a": 1, "b": [None, 2.0]}, slice(3))))
    [1, None, 2.0, None, 3, None]
    """
    found: list[TorchValue] = []
    _gather(tree, found)
    return iter(found)


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Return every tensor in `tree`, in order."""
    return (x for x in leaves_in(tree) if isinstance(x, Tensor))


def map_leaves(fn: Callable[[TorchValue], TorchValue], tree: TorchValue) -> TorchValue:
    """Return `tree` with every leaf replaced by `fn(leaf)`, in order; containers keep their types.

    A mapping that cannot be copied or written to becomes a dict.

    >>> map_leaves(str, {"a": (1, None)})
    {'a': ('1', 'None')}
    """
    return _mapped(fn, tree, True)


def map_tensors(fn: Callable[[Tensor], TorchValue], tree: TorchValue) -> TorchValue:
    """Return `tree` with every tensor replaced by `fn(tensor)`; other leaves stay, and containers keep their types."""
    return _mapped(fn, tree, False)


def key_of_tree(tree: TorchValue, key_of_leaf: Callable[[TorchValue], Hashable]) -> Hashable:
    """Return a key for `tree`: the types, lengths and keys of its lists, tuples and mappings, and the key of each leaf.

    >>> key_of_tree([1, 2], type) == key_of_tree([3, 4], type), key_of_tree([1], type) == key_of_tree((1,), type)
    (True, False)
    """
    if isinstance(tree, (list, tuple)):
        return (type(tree), *[key_of_tree(v, key_of_leaf) for v in tree])
    if isinstance(tree, Mapping):
        return (type(tree), *[(k, key_of_tree(v, key_of_leaf)) for k, v in tree.items()])
    if isinstance(tree, slice):
        return (slice, key_of_tree((tree.start, tree.stop, tree.step), key_of_leaf))
    return key_of_leaf(tree)


def _gather(tree: TorchValue, found: list[TorchValue]) -> None:
    kind = _kind_of(type(tree))
    if kind is _SEQUENCE:
        for item in tree:
            _gather(item, found)
    elif kind is _MAPPING:
        for item in tree.values():
            _gather(item, found)
    elif kind is _SLICE:
        _gather((tree.start, tree.stop, tree.step), found)
    else:
        found.append(tree)


def _mapped(fn: Callable[[TorchValue], TorchValue], tree: TorchValue, every: bool) -> TorchValue:
    kind = _kind_of(type(tree))
    if kind is _TENSOR:
        return fn(tree)
    if kind is _SEQUENCE:
        return _rebuilt(tree, [_mapped(fn, v, every) for v in tree])
    if kind is _MAPPING:
        return _rebuilt_mapping(tree, {k: _mapped(fn, v, every) for k, v in tree.items()})
    if kind is _SLICE:
        return slice(*[_mapped(fn, v, every) for v in (tree.start, tree.stop, tree.step)])
    return fn(tree) if every else tree


def _rebuilt(old: TorchValue, items: list[TorchValue]) -> TorchValue:
    if type(old) is list:
        return items
    if type(old) is tuple:
        return tuple(items)
    return type(old)(*items) if hasattr(old, "_fields") else type(old)(items)


def _rebuilt_mapping(old: TorchValue, items: dict[TorchValue, TorchValue]) -> TorchValue:
    """Return a mapping of the type of `old`: `output[0]` is the first entry of a transformers output, not of a dict."""
    if type(old) is dict or not isinstance(old, MutableMapping):
        return items
    try:
        new = copy(old)
        for key, value in items.items():
            new[key] = value
    except Exception:  # a class of the user's may refuse both
        return items
    return new
