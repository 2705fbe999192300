"""The parameters and states of an optimizer, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm import Group
from meshwright.tensor import DistTensor


class NamedTensor(NamedTuple):
    """A tensor and its name for people: that of the parameter, and the key of a state."""

    name: str
    tensor: Tensor


_SHOWN = 4


def listed(findings: Sequence[str]) -> str:
    """Return the first findings of a check as one text, and the number of the others."""
    more = f"; and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    return f"{'; '.join(findings[:_SHOWN])}{more}"


def parameters_of(optimizer: Optimizer) -> list[NamedTensor]:
    """Return the parameters in their order, which is the same on every rank.

    An optimizer that was given `model.named_parameters()` has names; otherwise numbers are used.
    """
    found: list[NamedTensor] = []
    for at, group in enumerate(optimizer.param_groups):
        names: Sequence[str] = group.get("param_names") or [
            f"parameter {n} of group {at}" for n in range(len(group["params"]))
        ]
        found += [NamedTensor(name, p) for name, p in zip(names, group["params"], strict=True)]
    return found


def states_of(optimizer: Optimizer, parameters: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the states that are tensors on a mesh."""
    for each in parameters:
        states: dict[str, Any] = optimizer.state.get(each.tensor, {})
        for key, x in states.items():
            if isinstance(x, DistTensor):
                yield NamedTensor(f"{each.name}, {key}", x)


def ranks_of(tensors: Sequence[NamedTensor]) -> Group:
    """Return the ranks of all meshes that the tensors are on."""
    meshes = {id(x.tensor.spec.mesh): x.tensor.spec.mesh for x in tensors if isinstance(x.tensor, DistTensor)}
    return tuple(sorted({rank for mesh in meshes.values() for rank in mesh.process_ids}))


def on_all(tensors: Sequence[NamedTensor], group: Group) -> list[Tensor]:
    """Return the tensors whose mesh has all ranks of `group`, the ranks of all meshes."""
    return [x.tensor for x in tensors if isinstance(x.tensor, DistTensor) and x.tensor.spec.mesh.size == len(group)]
