"""All candidate plans for a model on a number of ranks, as arrays of degrees that satisfy the divisibility rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import isqrt
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from ..plan_data.plan import Recompute, plan_of
from .degrees import NUMBERS, Plans
from .schedule_facts import facts_of
from .simulated_step import has_table
from .sizes import Transformer

T = TypeVar("T")
SCHEDULES = (
    "1F1B", "Interleaved 1F1B", "Interleaved zero bubble", "ZB-1p", "ZB-2p", "ZB-V", "V-Half", "V-Min", "Wave",
    "DualPipe-V",
)  # fmt: skip
MICROBATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
ONE = "1F1B"
PER_RANK = 2048
"""Least number of tokens of a sequence for each rank that shares it."""


def candidates(
    model: Transformer, ranks: int, batch: int, sequence: int, precision: str, per_node: int, given: Mapping[str, Any]
) -> Iterator[Plans]:
    """Yield bundles of plans that share schedule, recomputation and precision; `given` has the fields that are fixed.

    Raises:
        SearchError: `given` has a name or a value that no plan has.
    """
    plan_of(given)
    rows = np.array(list(_rows(model, ranks, batch, sequence, per_node, given)), dtype=float).reshape(-1, len(NUMBERS))
    for schedule, recompute in _words_of_plans(given):
        own = rows[_has_schedule(rows, schedule)]
        if len(own):
            numbers = dict(zip(NUMBERS, own.T, strict=True))
            yield Plans(**numbers, schedule=schedule, recompute=recompute, precision=precision)


def count_bundles(given: Mapping[str, Any]) -> int:
    """Return an upper bound on the number of bundles."""
    return len(_words_of_plans(given))


def _words_of_plans(given: Mapping[str, Any]) -> list[tuple[str, Recompute]]:
    return list(product(_allowed(given, "schedule", SCHEDULES), _allowed(given, "recompute", get_args(Recompute))))


def _has_schedule(rows: NDArray[np.float64], schedule: str) -> NDArray[np.bool_]:
    """Return the mask of the rows that a schedule applies to: one stage has no other schedule than `ONE`."""
    facts = facts_of(schedule)
    pp, chunks, dp, size, batch = (
        rows[:, NUMBERS.index(name)] for name in ("pp", "chunks", "dp", "microbatch", "batch")
    )
    count = batch / (dp * size)
    several = facts.has_chunks(chunks) & facts.fits(pp, count, chunks) & has_table(schedule, pp, count, chunks)
    alone = (pp == 1) & (chunks == 1) & (schedule == ONE)
    return np.where(pp > 1, several, alone)


def _rows(
    model: Transformer, ranks: int, batch: int, sequence: int, per_node: int, given: Mapping[str, Any]
) -> Iterator[tuple[float, ...]]:
    for dp, tp, pp, cp in meshes(model, ranks, batch, sequence, per_node, given):
        own = batch // dp
        sizes = [m for m in _allowed(given, "microbatch", MICROBATCHES) if own % m == 0]
        chunks = [v for v in _allowed(given, "chunks", CHUNKS) if v == 1 or (pp > 1 and pp * v <= model.layers)]
        for ep, zero, m, v in product(
            _experts(model, dp * cp * tp, given), _allowed(given, "zero", (0, 1, 2, 3)), sizes, chunks
        ):
            if (zero in (2, 3) and pp > 1) or (zero and dp * cp == 1):
                continue
            for divided in _allowed(given, "sequence_parallel", (tp > 1,)):
                yield dp, tp, pp, cp, ep, v, zero, divided, m, batch, sequence


def meshes(
    model: Transformer, ranks: int, batch: int, sequence: int, per_node: int, given: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the dp, tp, pp and cp whose product is the number of ranks; a tensor-parallel group stays in a node."""
    for tp in tensor_sizes(model, per_node, given):
        if ranks % tp or not stays_in_a_node(tp, ranks, per_node):
            continue
        for pp in _among(given, "pp", [p for p in divisors(ranks // tp) if p <= model.layers]):
            rest = ranks // (tp * pp)
            for cp in context_sizes(sequence, given):
                dp = rest // cp
                if rest % cp == 0 and batch % dp == 0 and given.get("dp", dp) == dp:
                    yield dp, tp, pp, cp


def stays_in_a_node(tp: int, ranks: int, per_node: int) -> bool:
    """True if no group of `tp` neighbouring ranks is on two nodes.

    >>> stays_in_a_node(3, 6, 8), stays_in_a_node(3, 24, 8), stays_in_a_node(4, 24, 8)
    (True, False, True)
    """
    return ranks <= per_node or per_node % tp == 0


def tensor_sizes(model: Transformer, per_node: int, given: Mapping[str, Any]) -> list[int]:
    """Return the numbers of ranks that may share a layer: all have equally many heads, key heads may be repeated."""
    found = [t for t in divisors(model.heads) if t <= per_node]
    return _among(given, "tp", [t for t in found if model.kv_heads % t == 0 or t % model.kv_heads == 0])


def context_sizes(sequence: int, given: Mapping[str, Any]) -> list[int]:
    """Return the numbers of ranks that may share a sequence: it is cut into two even parts for each rank."""
    longest = max(1, sequence // PER_RANK)
    found = [c for c in divisors(sequence // 2) if c <= longest and sequence % (2 * c) == 0]
    return _among(given, "cp", sorted({1, *found}))


def _experts(model: Transformer, ranks: int, given: Mapping[str, Any]) -> list[int]:
    if model.experts is None:
        return _among(given, "ep", [1])
    return _among(given, "ep", [e for e in divisors(ranks) if model.experts.count % e == 0])


def _allowed(given: Mapping[str, Any], name: str, values: tuple[T, ...]) -> tuple[T, ...]:
    """Return the given value alone, or `values` if none is given."""
    return (given[name],) if name in given else values


def _among(given: Mapping[str, Any], name: str, values: list[int]) -> list[int]:
    """Return those of the possible `values` that equal the given one, or all of them if none is given."""
    return [v for v in values if given.get(name, v) == v]


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order; none for 0."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
