"""The least sum of tables is that of looking at every combination."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright.search._eliminate import Table, least


def some(seed: int) -> tuple[list[int], list[Table]]:
    """A few variables, and tables over up to three of them."""
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 7))]
    tables: list[Table] = []
    for _ in range(draw.randint(1, 10)):
        chosen = tuple(draw.sample(range(len(sizes)), draw.randint(1, min(3, len(sizes)))))
        costs = numbers.integers(0, 20, [sizes[v] for v in chosen]).astype(float)
        tables.append(Table(chosen, np.where(numbers.random(costs.shape) < 0.1, np.inf, costs)))
    return sizes, tables


@pytest.mark.parametrize("seed", range(300))
def test_it_is_that_of_every_combination(seed: int) -> None:
    sizes, tables = some(seed)

    def summed(values: tuple[int, ...]) -> float:
        return sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)

    value, chosen = least(sizes, tables)
    assert value == min(summed(values) for values in np.ndindex(*sizes))
    assert summed(chosen) == value


def test_a_long_chain_takes_no_longer_than_its_links() -> None:
    links = [Table((n, n + 1), np.random.default_rng(n).random((8, 8))) for n in range(3000)]
    value, chosen = least([8] * 3001, links)
    assert value == pytest.approx(sum(t.costs[chosen[n], chosen[n + 1]] for n, t in enumerate(links)))
