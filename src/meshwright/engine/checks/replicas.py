"""Tensors of which several ranks hold the same part: compared by sums of their bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm import Group, current_communicator
from meshwright.layout import Spec
from meshwright.tensor import DistTensor, local_parts

from .._errors import ReplicaError
from .known_answers import diagnosis
from .named_tensors import NamedTensor, listed

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def replicas_of(spec: Spec, rank: int) -> Group:
    """Return the ranks that hold the same part as `rank`."""
    cut = {axis for axes in spec.layout.dims for axis in (axes if isinstance(axes, tuple) else ())}
    pending = set(spec.layout.partial_axes)
    axes = [axis for axis in spec.mesh.sizes if axis not in cut | pending]
    return spec.mesh.group(rank, axes) if axes else (rank,)


def by_group(tensors: Sequence[NamedTensor]) -> dict[Group, list[NamedTensor]]:
    """Return the tensors that this rank shares with others, by the ranks that hold the same parts."""
    rank, found = current_communicator().rank, dict[Group, list[NamedTensor]]()
    for each in tensors:
        x = each.tensor
        if isinstance(x, DistTensor) and rank in x.spec.mesh:
            group = replicas_of(x.spec, rank)
            if len(group) > 1:
                found.setdefault(group, []).append(each)
    return dict(sorted(found.items()))


def sums(tensors: Sequence[NamedTensor]) -> list[int]:
    """Return a number for each local part that another bit would change."""
    with local_parts():
        parts = [bits(each.tensor) for each in tensors]
        found = torch.stack([x.sum(dtype=torch.int64) for x in parts]) if parts else torch.zeros(0, device="cpu")
        return [int(n) for n in found.tolist()]


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as whole numbers, in one dim."""
    plain = x.detach().as_subclass(Tensor)
    whole = torch.view_as_real(plain) if plain.is_complex() else plain
    return whole.contiguous().reshape(-1).view(_WORDS[whole.element_size()])


def difference(tensors: Sequence[NamedTensor]) -> tuple[Group, list[NamedTensor], list[int]] | None:
    """Return the first group whose ranks hold different numbers, its tensors and the own sums; None if there is none.

    Every rank of every group makes the call.
    """
    here, found = current_communicator(), None
    for group, shared in by_group(tensors).items():
        own = sums(shared)
        total = (torch.tensor(own, device="cpu") * torch.arange(1, 2 * len(own), 2, device="cpu")).sum()
        highest, lowest = here.all_reduce(torch.stack([total, ~total]), "max", group).tolist()
        if highest != ~lowest and found is None:
            found = group, shared, own
    return found


def replica_error(step: str, group: Group, shared: Sequence[NamedTensor], own: Sequence[int]) -> ReplicaError:
    """Return the error that names tensors and ranks; every rank of the group makes the call."""
    here, shape = current_communicator(), (len(own),)
    rows = [x.tolist() for x in here.all_gather(torch.tensor(own, device="cpu"), group, [shape] * len(group))]
    told: list[str] = []
    for at, each in enumerate(shared):
        values = [row[at] for row in rows]
        common, count = Counter(values).most_common(1)[0]
        if count < len(group):
            ranks = [str(r) for r, v in zip(group, values, strict=True) if v != common or count == 1 or len(group) == 2]
            told.append(f"{each.name} differs on rank {', '.join(ranks)}")
    return ReplicaError(
        f"the comparison of replicas before {step}",
        listed(told),
        f"ranks {', '.join(map(str, group))} hold the same tensors; {diagnosis(group)}",
        "start again from the last checkpoint, without the machine of that rank if the fault persists; if this is the "
        "first step, give every rank the same parameters (a seed, or load_state_dict)",
    )


def error_elsewhere(step: str) -> ReplicaError:
    """Return the error on a rank that holds none of the tensors that differ."""
    return ReplicaError(
        f"the comparison of replicas before {step}",
        "tensors that differ on other ranks",
        "ranks that should hold the same numbers do not",
        "look at the errors of the other ranks, which name them",
    )
