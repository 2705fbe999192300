"""Variable elimination: the least sum of tables equals that of exhaustive search."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright.search.sharding.variable_elimination import Table, least


def random_tables(seed: int) -> tuple[list[int], list[Table]]:
    """Return a few variables, and tables over up to three of them."""
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
def test_the_minimum_is_that_of_all_combinations(seed: int) -> None:
    sizes, tables = random_tables(seed)

    def summed(values: tuple[int, ...]) -> float:
        return sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)

    best = min(summed(values) for values in np.ndindex(*sizes))
    value, chosen, bound = least(sizes, tables)
    assert value == best == bound
    assert summed(chosen) == value


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.parametrize("most", [1, 6])
def test_a_partial_search_gives_a_lower_bound(seed: int, most: int) -> None:
    sizes, tables = random_tables(seed)

    def summed(values: tuple[int, ...]) -> float:
        return sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)

    value, chosen, bound = least(sizes, tables, most=most)
    assert bound <= min(summed(values) for values in np.ndindex(*sizes)) <= value
    assert summed(chosen) == value


def test_a_wide_problem_is_solved_approximately() -> None:
    numbers = np.random.default_rng(0)
    pairs = [Table((u, v), numbers.random((4, 4))) for u in range(24) for v in range(u)]
    value, chosen, bound = least([4] * 24, pairs, most=4**8)
    drawn = [numbers.integers(0, 4, 24) for _ in range(2000)]
    assert value < min(sum(float(t.costs[c[t.variables[0]], c[t.variables[1]]]) for t in pairs) for c in drawn)
    assert 0 < bound < value
    assert len(chosen) == 24


def test_time_is_linear_in_the_length_of_a_chain() -> None:
    links = [Table((n, n + 1), np.random.default_rng(n).random((8, 8))) for n in range(3000)]
    value, chosen, _ = least([8] * 3001, links)
    assert value == pytest.approx(sum(t.costs[chosen[n], chosen[n + 1]] for n, t in enumerate(links)))
