"""Sizes near those that were asked for which a plan exists or fits: numbers of ranks, and of sequences per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost import Cluster

from .candidates import ONE, candidates, context_sizes, divisors, stays_in_a_node, tensor_sizes
from .degrees import NUMBERS
from .peak_memory import hold
from .sizes import Transformer
from .software import Software

DOUBLINGS = 12
"""Largest number of times that a number of ranks is doubled in search of one that fits into memory."""
TRIED = 4
"""Largest number of sizes that are tried below and above. Not every size has a plan with the fixed fields."""


class NearestSizes(NamedTuple):
    """Numbers of ranks for the same batch, and batches for the same number of ranks: the nearest below and above."""

    ranks: tuple[int, ...]
    batch: tuple[int, ...]

    def __str__(self) -> str:
        texts = [
            f"{' or '.join(f'{n:,}' for n in sizes)} {what}"
            for sizes, what in ((self.ranks, "ranks"), (self.batch, "sequences per step"))
            if sizes
        ]
        return ", or ".join(texts)


def nearest_sizes(
    model: Transformer, ranks: int, batch: int, sequence: int, per_node: int, given: Mapping[str, Any]
) -> NearestSizes:
    """Return the nearest sizes for which a plan exists; `given` has the fields that are fixed."""
    inner = _inner_sizes(model, sequence, per_node, given)
    unit = given.get("microbatch", 1)
    replicas = [d for d in divisors(batch // unit) if batch % unit == 0 and given.get("dp", d) == d]
    numbers = {dp * size for dp, (tp, size) in product(replicas, inner) if stays_in_a_node(tp, dp * size, per_node)}
    whole = {size for tp, size in inner if ranks % size == 0 and stays_in_a_node(tp, ranks, per_node)}
    batches = _near_batches(
        batch, {ranks // size for size in whole} & {given.get("dp", ranks // n) for n in whole}, unit
    )

    def has_plan(ranks: int, batch: int) -> bool:
        return any(True for _ in candidates(model, ranks, batch, sequence, "bf16", per_node, given))

    return NearestSizes(
        _neighbours(ranks, numbers, lambda n: has_plan(n, batch)),
        _neighbours(batch, batches, lambda n: has_plan(ranks, n)),
    )


def _near_batches(batch: int, replicas: Iterable[int], unit: int) -> set[int]:
    """Return the batches next to `batch` that have whole microbatches of `unit` on each of some numbers of replicas."""
    steps = [dp * unit for dp in replicas]
    return {step * times for step in steps for times in (batch // step, batch // step + 1) if times}


def nearest_choices(
    model: Transformer, ranks: int, batch: int, sequence: int, per_node: int, given: Mapping[str, Any]
) -> Iterator[str]:
    """Yield, for each fixed number, the nearest ones with which a plan exists if the other choices stay."""
    for name in given.keys() & set(NUMBERS):
        others = {other: value for other, value in given.items() if other != name}
        found = candidates(model, ranks, batch, sequence, "bf16", per_node, others)
        values = sorted({int(n) for plans in found for n in np.unique(getattr(plans, name))})
        near = _neighbours(given[name], values, lambda n: True)
        if near:
            yield f"{name} = {' or '.join(map(str, near))}"


def fitting_ranks(
    model: Transformer,
    cluster: Cluster,
    ranks: int,
    batch: int,
    sequence: int,
    precision: str,
    memory_limit: float,
    given: Mapping[str, Any],
    software: Software,
) -> int | None:
    """Return the number of ranks, by doubling, on which a plan for the same batch fits; None if there is none."""
    least = {"recompute": "full", "microbatch": 1, "schedule": ONE, **given}
    for more in (ranks << n for n in range(1, DOUBLINGS + 1)):
        found = candidates(model, more, batch, sequence, precision, cluster.per_node, least)
        if any(np.min(hold(model, plans, software).nbytes) <= memory_limit for plans in found):
            return more
    return None


def _inner_sizes(model: Transformer, sequence: int, per_node: int, given: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return each tp with the possible numbers of ranks of one replica: tp * pp * cp."""
    stages = [p for p in range(1, model.layers + 1) if given.get("pp", p) == p]
    tensor, context = tensor_sizes(model, per_node, given), context_sizes(sequence, given)
    return {(t, t * p * c) for t, p, c in product(tensor, stages, context)}


def _neighbours(wanted: int, sizes: Iterable[int], has_plan: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the largest size below and the smallest one above that have a plan."""
    known = sorted(set(sizes))
    below, above = [n for n in reversed(known) if n < wanted], [n for n in known if n > wanted]
    nearest = (next(filter(has_plan, side[:TRIED]), None) for side in (below, above))
    return tuple(n for n in nearest if n is not None)
