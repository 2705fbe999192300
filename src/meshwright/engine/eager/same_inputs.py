"""A check that the plain inputs of a model are the same on every rank.

A plain tensor counts as the whole batch on every rank. Accelerate's data loader and torch's DistributedSampler give
each rank other rows. Without the check, the model would mix the rows of several ranks, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from meshwright.comm import SimulatedCommunicator, current_communicator, world_ranks
from meshwright.tensor import DistTensor, captured_whole, largest_anywhere, local_parts

from .._errors import BatchError


class SameInputs:
    """A comparison of a model's inputs between ranks, at calls 1, 2, 4, 8, …

    Processes compare by two collectives of one number each. Simulated ranks compare in shared memory, so that a
    simulation counts only the collectives of the program.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._number = 0

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise BatchError if a plain tensor differs between ranks; every rank makes the call."""
        if any(captured_whole(x) is not None for x in tensors):
            return
        self._calls += 1
        plain = [x for x in tensors if not isinstance(x, DistTensor)]
        if not plain or current_communicator().size == 1 or self._calls & (self._calls - 1):
            return
        digest = _digest(plain)
        here = current_communicator()
        same = (
            self._same_as_before(here, digest)
            if isinstance(here, SimulatedCommunicator)
            else _same_everywhere(digest, plain[0])
        )
        if not same:
            shapes = ", ".join(str(tuple(x.shape)) for x in plain)
            raise BatchError(
                f"call {self._calls} of a parallel model with plain inputs",
                f"tensors of shapes {shapes} that differ between ranks",
                "a plain tensor must be the whole batch on every rank; a data loader gave each rank its own rows",
                "pass the whole batch on every rank, without a DistributedSampler, or use mw.shard_dataloader. "
                "With Accelerate or transformers' Trainer, call os.environ.update(LOCAL_RANK='-1', "
                "WORLD_SIZE='1') after mw.init_process()",
            )

    def _same_as_before(self, here: SimulatedCommunicator, digest: int) -> bool:
        """True if the simulated ranks that made this call before had the same inputs."""
        ranks = world_ranks()
        if self._calls == 1:  # ranks of one world make their models in the same order
            key = _MADE, ranks, here.rank
            self._number = here.shared[key] = here.shared.get(key, 0) + 1
        return here.shared.setdefault((_MADE, ranks, self._number, "call", self._calls), digest) == digest


_MADE = "inputs of parallel models"


def _same_everywhere(digest: int, like: Tensor) -> bool:
    """True if the number is equal on all processes."""
    number = torch.tensor(digest, device=like.device)
    return int(largest_anywhere(number)) == -int(largest_anywhere(-number))


def _digest(tensors: Sequence[Tensor]) -> int:
    """Return a number that almost surely differs for tensors with other shapes, dtypes or elements."""
    found = blake2b(digest_size=7)
    with local_parts():
        for x in tensors:
            found.update(f"{tuple(x.shape)} {x.dtype}".encode())
            if not x.is_meta:
                found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "little")
