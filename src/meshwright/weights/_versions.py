"""Numbered versions of a model's weights.

A version is a state of the weights that somebody observed. Each observation compares the address of each tensor and the
number of writes to its memory with the last ones, which is a few microseconds for each tensor. So an optimizer's step,
a static program and a load of a checkpoint are noticed, and a step that nobody observes costs nothing. torch does not
count writes through `x.data` of a plain tensor: `torch.autograd.graph.increment_version(x)` makes them known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshwright.checkpoint import World, current_world
from meshwright.tensor import DistTensor, Mark, mark_of

from ._tensors import named_tensors

_SAME, _WRITTEN, _MOVED = 0, 1, 2


@dataclass(slots=True)
class Versions:
    """The number of the last observed version, from 1 on, and the version at which each tensor changed last.

    `moved` has the last version at which a tensor got other memory.
    """

    number: int = 0
    written: dict[str, int] = field(default_factory=dict[str, int])
    moved: dict[str, int] = field(default_factory=dict[str, int])
    marks: dict[str, Mark] = field(default_factory=dict[str, Mark])

    def observe(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number of the current version; a new one if a tensor has changed on some rank.

        Every rank makes the call: the ranks compare their observations, unless all tensors are plain.
        """
        marks = {name: mark_of(x) for name, x in tensors.items()}
        codes = [_change(self.marks.get(name), mark) for name, mark in marks.items()]
        if any(isinstance(x, DistTensor) for x in tensors.values()):
            codes = largest_on_ranks(codes, current_world())
        self.marks = marks
        if any(codes):
            self.number += 1
        for name, code in zip(marks, codes, strict=True):
            if code:
                self.written[name] = self.number
            if code == _MOVED:
                self.moved[name] = self.number
        return self.number


def _change(before: Mark | None, now: Mark) -> int:
    if before == now:
        return _SAME
    return _WRITTEN if before is not None and before[0] == now[0] else _MOVED


def largest_on_ranks(codes: Sequence[int], world: World) -> list[int]:
    """Return the largest of each code over all ranks, by one collective with a byte for each."""
    if world.communicator is None or world.size == 1:
        return list(codes)
    mine = torch.tensor(codes, dtype=torch.uint8, device="cpu")
    found = world.communicator.all_gather(mine, world.ranks, [(len(codes),)] * world.size)
    return torch.stack(found).amax(0).tolist()


_known: WeakKeyDictionary[nn.Module, Versions] = WeakKeyDictionary()


def versions_of(model: nn.Module) -> Versions:
    """Return the versions of a model; all samplers of a model count the same ones."""
    return _known.setdefault(model, Versions())


def observed_version(model: nn.Module) -> int:
    """Return the number of the current version of the model's weights; every rank makes the call."""
    return versions_of(model).observe(named_tensors(model))
