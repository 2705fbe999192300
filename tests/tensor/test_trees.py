"""Trees of arguments, batches and results: the definition of a leaf, and the order of leaves."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from meshwright.tensor import leaves_in, map_leaves, map_tensors, tensors_in

A, B = torch.zeros(2), torch.ones(3)


class Pair(NamedTuple):
    """A tuple with names."""

    x: Any
    y: Any


@dataclass
class Output(OrderedDict[str, Any]):
    """An output as in the transformers library: a mapping that is a dataclass, too."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        self.update((name, value) for name, value in vars(self).items() if value is not None)


class Locked(UserDict[str, Any]):
    """A mapping that refuses changes after its construction."""

    def __setitem__(self, key: str, item: Any) -> None:
        if key in self.data:
            raise TypeError("locked")
        super().__setitem__(key, item)


@dataclass
class Plain:
    """A leaf."""

    x: Any


PLAIN = Plain(A)

TREES: dict[str, tuple[Any, list[Any]]] = {
    "leaf": (A, [A]),
    "none": (None, [None]),
    "nested": ([A, (1, [B, "text"]), None], [A, 1, B, "text", None]),
    "empty": (((), [], {}), []),
    "dict": ({"b": A, "a": {"z": 1, "c": B}}, [A, 1, B]),
    "named": (Pair(A, [Pair(1, B)]), [A, 1, B]),
    "size": (torch.Size([2, 3]), [2, 3]),
    "results": (torch.tensor([[3.0]]).max(0), [torch.tensor([3.0]), torch.tensor([0])]),
    "slice": (slice(A, None, 2), [A, None, 2]),
    "mapping": (UserDict({"b": A, "a": 1}), [A, 1]),
    "output": (Output(logits=B, loss=A), [A, B]),
    "dataclass": ((PLAIN, torch.float32, 1.5), [PLAIN, torch.float32, 1.5]),
}


def same(found: list[Any], wanted: list[Any]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a is b or a == b for a, b in pairs)


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_counted_in_order(name: str) -> None:
    tree, wanted = TREES[name]
    assert same(list(leaves_in(tree)), wanted)
    assert same(list(tensors_in(tree)), [x for x in wanted if isinstance(x, Tensor)])


@pytest.mark.parametrize("name", TREES)
def test_trees_are_mapped_leaf_by_leaf(name: str) -> None:
    tree, wanted = TREES[name]
    asked: list[Any] = []
    assert same(list(leaves_in(map_leaves(lambda x: asked.append(x) or x, tree))), wanted)
    assert same(asked, wanted)
    mapped = list(leaves_in(map_tensors(lambda x: "tensor", tree)))
    assert same(mapped, ["tensor" if isinstance(x, Tensor) else x for x in wanted])


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ([A], list),
        ((A,), tuple),
        (Pair(A, 1), Pair),
        ({}, dict),
        (Output(A), Output),
        (UserDict(a=A), UserDict),
        (OrderedDict(a=A), OrderedDict),
        (defaultdict(list, a=A), defaultdict),
        (MappingProxyType({"a": A}), dict),
        (Locked(a=A), dict),
    ],
)
def test_containers_keep_their_type_unless_they_cannot_be_written_to(tree: Any, kind: type) -> None:
    assert type(map_leaves(lambda x: x, tree)) is kind
    assert type(map_tensors(lambda x: x, tree)) is kind


def test_a_mapped_output_has_the_new_tensors_and_the_old_one_stays() -> None:
    old = Output(A, B)
    new = map_tensors(lambda x: x + 1, old)
    assert torch.equal(new["loss"], A + 1)
    assert old["loss"] is A
