"""The steps at which replicas are compared: before the first update, then as often as a share of the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from meshwright.comm import Group, current_communicator

from . import replicas
from .initial_values import compare_first_values
from .named_tensors import NamedTensor
from .step_checks import StepChecks

SHARE = 0.005
"""Most time that comparisons of replicas take, as a share of all steps."""
MOST_STEPS = 10_000
WARM_STEPS = 8
"""Steps after which the time of a step is taken as known: the first ones compile and allocate."""


@dataclass(slots=True)
class Rhythm:
    """The number of the next step, and the step of the next comparison of replicas.

    `every` is the number of steps between comparisons; 0 until the times of a comparison and of a step are known.
    """

    step: int = 0
    next: int = 0
    every: int = 0
    took: float = 0.0
    """Seconds of the last comparison."""
    began: float | None = None
    """Time of the last call of `wish`, in seconds."""
    fastest: float = math.inf
    """Seconds of the fastest step so far."""

    def is_due(self) -> bool:
        """True if the replicas are to be compared before this step."""
        return self.step == self.next

    def wish(self) -> int:
        """Return the number of steps between comparisons that this rank would choose; 0 if that is not known yet."""
        now, before = time.perf_counter(), self.began
        self.began = now
        if before is not None:
            self.fastest = min(self.fastest, now - before)
        if self.step < WARM_STEPS:
            return 0
        return min(MOST_STEPS, max(1, math.ceil(self.took / (SHARE * self.fastest))))

    def advance(self, every: int) -> None:
        """Advance to the next step. After a comparison, or once `every` is known, the next is `every` steps later."""
        if every and (self.is_due() or not self.every):
            self.every, self.next = every, self.step + every
        self.step += 1


def compare_replicas(
    rhythm: Rhythm, checks: StepChecks, tensors: Callable[[], Iterable[NamedTensor]], step: str, group: Group
) -> None:
    """Compare replicas if a comparison is due, and advance to the next step; every rank of the group makes the call.

    Raises:
        ReplicaError: ranks that should hold the same numbers do not; raised on all ranks.
    """
    if checks.replicas == 0:
        rhythm.step += 1
        return
    is_due, wish, found = rhythm.is_due(), checks.replicas or rhythm.wish(), None
    if is_due:
        begin = time.perf_counter()
        found = replicas.difference(list(tensors()))
        rhythm.took = time.perf_counter() - begin
    if is_due or not rhythm.every:
        differs, least = (
            current_communicator()
            .all_reduce(torch.tensor([-(found is not None), -wish], device="cpu"), "min", group)
            .tolist()
        )
        if differs:
            raise replicas.replica_error(step, *found) if found is not None else replicas.error_elsewhere(step)
        wish = -least
    if is_due and rhythm.step == 0:
        compare_first_values(list(tensors()), step)
    rhythm.advance(wish)
