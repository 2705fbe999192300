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
from .predict import FILLING
from .sizes import Transformer

T = TypeVar("T")
SCHEDULES = ("1F1B", "Interleaved 1F1B", "ZB-1p", "ZB-2p")
MICROBATCHES = (1, 2, 4, 8, 16, 32)
ONE = "1F1B"


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
    """Return the mask of the rows that a schedule applies to.

    One stage has no other schedule than `ONE`, and only interleaved schedules have several chunks.
    """
    pp, chunks = rows[:, NUMBERS.index("pp")], rows[:, NUMBERS.index("chunks")]
    return (chunks > 1) if schedule == "Interleaved 1F1B" else (chunks == 1) & ((pp > 1) | (schedule == ONE))


def _rows(
    model: Transformer, ranks: int, batch: int, sequence: int, per_node: int, given: Mapping[str, Any]
) -> Iterator[tuple[float, ...]]:
    for dp, tp, pp, cp in _meshes(model, ranks, batch, sequence, per_node, given):
        own = batch // dp
        sizes = [m for m in _allowed(given, "microbatch", MICROBATCHES) if own % m == 0]
        chunks = [v for v in _allowed(given, "chunks", (1, 2, 3, 4, 6, 8)) if v == 1 or _interleaves(model, pp, v, own)]
        for ep, zero, m, v in product(
            _experts(model, dp * cp, given), _allowed(given, "zero", (0, 1, 2, 3)), sizes, chunks
        ):
            if (zero in (2, 3) and pp > 1) or (zero and dp * cp == 1):
                continue
            for divided in _allowed(given, "sequence_parallel", (tp > 1,)):
                yield dp, tp, pp, cp, ep, v, zero, divided, m, batch, sequence


def _meshes(
    model: Transformer, ranks: int, batch: int, sequence: int, per_node: int, given: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the dp, tp, pp and cp whose product is the number of ranks; a tensor-parallel group stays in a node."""
    shared = np.gcd(model.heads, model.kv_heads)
    for tp in _among(given, "tp", [t for t in _divisors(ranks) if t <= per_node and shared % t == 0]):
        for pp in _among(given, "pp", [p for p in _divisors(ranks // tp) if _splits_layers(model.layers, p)]):
            rest = ranks // (tp * pp)
            for cp in _among(given, "cp", _context_sizes(rest, sequence)):
                dp = rest // cp
                if dp * cp * tp * pp == ranks and batch % dp == 0 and given.get("dp", dp) == dp:
                    yield dp, tp, pp, cp


def _context_sizes(ranks: int, sequence: int) -> list[int]:
    """Return the numbers of ranks that may share a sequence: it is cut into two even parts for each rank."""
    longest = max(1, sequence // 2048)
    return [c for c in _divisors(ranks) if c == 1 or (c <= longest and sequence % (2 * c) == 0)]


def _splits_layers(layers: int, stages: int) -> bool:
    return stages <= layers and (layers % stages == 0 or (layers + 2) % stages == 0)


def _interleaves(model: Transformer, pp: int, chunks: int, own: int) -> bool:
    return pp > 1 and model.layers % (pp * chunks) == 0 and own % pp == 0


def _experts(model: Transformer, ranks: int, given: Mapping[str, Any]) -> list[int]:
    if model.experts is None:
        return _among(given, "ep", [1])
    return _among(given, "ep", [e for e in _divisors(ranks) if model.experts.count % e == 0])


def _allowed(given: Mapping[str, Any], name: str, values: tuple[T, ...]) -> tuple[T, ...]:
    """Return the given value alone, or `values` if none is given."""
    return (given[name],) if name in given else values


def _among(given: Mapping[str, Any], name: str, values: list[int]) -> list[int]:
    """Return those of the possible `values` that equal the given one, or all of them if none is given."""
    return [v for v in values if given.get(name, v) == v]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


assert set(SCHEDULES) <= set(FILLING)
