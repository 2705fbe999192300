"""Many plans at once: one array per degree, so that one plan and many are priced by the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import Numbers

from ..plan_data.plan import Plan, Recompute


class Degrees(Protocol):
    """Fields of a plan that its price depends on: numbers, or arrays with one element per plan."""

    @property
    def dp(self) -> Numbers: ...
    @property
    def tp(self) -> Numbers: ...
    @property
    def pp(self) -> Numbers: ...
    @property
    def cp(self) -> Numbers: ...
    @property
    def ep(self) -> Numbers: ...
    @property
    def chunks(self) -> Numbers: ...
    @property
    def zero(self) -> Numbers: ...
    @property
    def sequence_parallel(self) -> Numbers: ...
    @property
    def microbatch(self) -> Numbers: ...
    @property
    def batch(self) -> Numbers: ...
    @property
    def sequence(self) -> Numbers: ...
    @property
    def schedule(self) -> str: ...
    @property
    def recompute(self) -> Recompute: ...
    @property
    def precision(self) -> str: ...


@dataclass(frozen=True)
class Plans:
    """Plans that share schedule, recomputation and precision, as arrays."""

    dp: NDArray[np.float64]
    tp: NDArray[np.float64]
    pp: NDArray[np.float64]
    cp: NDArray[np.float64]
    ep: NDArray[np.float64]
    chunks: NDArray[np.float64]
    zero: NDArray[np.float64]
    sequence_parallel: NDArray[np.float64]
    microbatch: NDArray[np.float64]
    batch: NDArray[np.float64]
    sequence: NDArray[np.float64]
    schedule: str
    recompute: Recompute
    precision: str


NUMBERS = tuple(f.name for f in fields(Plans) if f.name not in ("schedule", "recompute", "precision"))


def columns(plans: Sequence[Plan]) -> Plans:
    """Return plans that share schedule, recomputation and precision as arrays."""
    first = plans[0]
    numbers = {name: np.array([float(getattr(p, name)) for p in plans]) for name in NUMBERS}
    return Plans(**numbers, schedule=first.schedule, recompute=first.recompute, precision=first.precision)


def microbatches(plan: Degrees) -> Numbers:
    """Return the number of microbatches that one rank runs in a step."""
    return np.maximum(1.0, np.round(plan.batch / (plan.microbatch * plan.dp)))


def tokens(plan: Degrees) -> Numbers:
    """Return the number of tokens of a microbatch on one rank."""
    return plan.microbatch * (plan.sequence / plan.cp)


def residual_tokens(plan: Degrees) -> Numbers:
    """Return the number of tokens of a microbatch whose residual a rank holds."""
    return tokens(plan) / np.where(plan.sequence_parallel, plan.tp, 1)
