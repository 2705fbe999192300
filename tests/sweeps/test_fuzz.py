"""A small part of the figure `fuzz`: random programs, values and gradients, and the laws of the fuzzer itself."""

from __future__ import annotations

import pytest

from benchmarks import _chains, fuzz
from benchmarks._chains import Chain
from benchmarks.opdb import Ours

CHAINS, PER_TEST = 200, 20

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of intended actions of the programs


@pytest.mark.parametrize("first", range(0, CHAINS, PER_TEST))
def test_random_programs_give_one_devices_numbers(first: int) -> None:
    failures = fuzz.fuzz(first, PER_TEST)
    assert not failures, "\n\n".join(f"{f.chain}\n# {f.message}" for f in failures)


def test_a_seed_always_gives_the_same_program() -> None:
    assert [_chains.draw(k) for k in range(5)] == [_chains.draw(k) for k in range(5)]


def test_most_entries_of_the_table_are_drawn() -> None:
    """200 programs use more than half of the entries, so 10,000 use practically all."""
    lines = "\n".join(line for k in range(200) for line in _chains.draw(k).lines)
    words = [op.code.split("(")[0].split(".")[-1] for op in _chains.OPS if "{v}" not in op.code]
    assert sum(word in lines for word in words) > len(words) / 2


def test_a_failing_program_is_reduced_to_the_relevant_lines() -> None:
    lines = ("v0 = leaf(1, (5, 3), 'S0')", "v1 = v0.sin()", "v2 = v1.cumsum(0)", "v3 = v2 * 2", "v4 = v0 + 1")
    small = _chains.shrink(Chain(0, (4,), lines), lambda chain: any("cumsum" in line for line in chain.lines))
    assert str(small).splitlines()[1:] == ["v0 = leaf(1, (5, 3), 'R')", "v1 = v0", "v2 = v1.cumsum(0)"]


def test_a_wrong_number_is_found() -> None:
    class Careless(Ours):
        def reshard(self, x: object, mesh: tuple[int, ...], marks: tuple[str, ...]) -> object:
            return super().reshard(x, mesh, marks) * 1.001

    chain = Chain(0, (4,), ("v0 = leaf(1, (5, 3), 'S0')", "v1 = reshard(v0, 'S1')"))
    assert fuzz.check(Ours(), chain) is None
    failure = fuzz.check(Careless(), chain)
    assert failure is not None
    assert "values differ" in failure.message
