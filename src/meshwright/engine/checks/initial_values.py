"""Compare, before the first update, the whole parameters that each rank has distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm import Group, current_communicator
from meshwright.tensor import DistTensor, initial_checksum_of

from .._errors import ReplicaError
from .named_tensors import NamedTensor, listed

_NONE = -1
"""The value for a part that was written to, or is of no whole tensor; checksums are not negative."""


def by_mesh(tensors: Sequence[NamedTensor]) -> dict[Group, list[NamedTensor]]:
    """Return the tensors of this rank by the ranks of their meshes, in an order that is the same on all ranks."""
    rank, found = current_communicator().rank, dict[Group, list[NamedTensor]]()
    for each in tensors:
        x = each.tensor
        if isinstance(x, DistTensor) and rank in x.spec.mesh:
            found.setdefault(tuple(sorted(x.spec.mesh.process_ids)), []).append(each)
    return {group: found[group] for group in sorted(found) if len(group) > 1}


def compare_first_values(tensors: Sequence[NamedTensor], step: str) -> None:
    """Compare the whole tensors that the ranks have distributed; every rank of every mesh makes the call.

    Raises:
        ReplicaError: ranks have distributed different values, and no rank has written to its part since.
    """
    for group, laid in by_mesh(tensors).items():
        own = [initial_checksum_of(each.tensor) for each in laid]
        bad = _differing(own, group)
        if bad:
            raise _initial_value_error(step, group, [laid[at].name for at in bad], [own[at] for at in bad])


def _differing(checksums: Sequence[int | None], group: Group) -> list[int]:
    """Return the indices of the checksums that differ between ranks; None equals every checksum."""
    highest = _most([_NONE if value is None else value for value in checksums], group)
    lowest = _most([_NONE - 2**32 if value is None else -value for value in checksums], group)
    return [at for at, (high, low) in enumerate(zip(highest, lowest, strict=True)) if high > -low]


def _most(values: Sequence[int], group: Group) -> list[int]:
    found = current_communicator().all_reduce(torch.tensor(values, device="cpu"), "max", group)
    return [int(value) for value in found.tolist()]


def _initial_value_error(step: str, group: Group, names: Sequence[str], own: Sequence[int | None]) -> ReplicaError:
    """Return the error that names the tensors and their checksums; every rank of the group makes the call."""
    mine = torch.tensor([_NONE if value is None else value for value in own], device="cpu")
    rows = [x.tolist() for x in current_communicator().all_gather(mine, group, [(len(own),)] * len(group))]
    told: list[str] = []
    for at, name in enumerate(names):
        sums = ", ".join(f"{row[at]:08x} on rank {rank}" for rank, row in zip(group, rows, strict=True) if row[at] >= 0)
        told.append(f"{name} with checksum {sums}")
    return ReplicaError(
        f"the comparison of parameters before {step}",
        f"ranks have distributed different values: {listed(told)}",
        "each rank distributes a whole tensor and keeps a part; parts of different tensors do not belong together",
        "give every rank the same parameters: call torch.manual_seed before building the model, or load_state_dict; "
        "use mw.dtensor_from_local for parts that each rank makes by itself",
    )
