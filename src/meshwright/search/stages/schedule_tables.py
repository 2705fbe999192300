"""Schedule tables from which the pipeline of a module is chosen, cached."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshwright.pipeline import BatchedSimulation, ScheduleError, ScheduleSizes, schedule_by_name

SCHEDULES = {"1F1B": 2**14, "ZB-H1": 2**11, "ZB-1p": 2**8, "ZB-2p": 2**8}
"""Schedule of one chunk per rank → the chunks times microbatches up to which its table is made in a short time."""
IN_LOOPS = {"Interleaved 1F1B": 2**11, "Interleaved zero bubble": 2**11}
"""The same for schedules of several chunks per rank in loops."""
IN_A_V = {"ZB-V": 2**9, "V-Half": 2**7, "V-Min": 2**7}
"""The same for schedules of two chunks per rank in a V."""
CHUNKS = 6
"""Upper bound on the chunks per rank: each further one gains less."""


def one_chunk_tables(ranks: int, microbatches: int) -> list[BatchedSimulation]:
    """Return the tables of one chunk per rank."""
    found = (_runs(name, ranks, microbatches, 1) for name in SCHEDULES)
    return [runs for runs in found if runs is not None]


def several_chunk_tables(ranks: int, microbatches: int, layers: int) -> Iterator[BatchedSimulation]:
    """Yield the tables of several chunks per rank, each of at least one layer."""
    for chunks in range(2, most_chunks(ranks, microbatches, layers) + 1):
        for name in (*IN_LOOPS, *(IN_A_V if chunks == 2 else ())):
            found = _runs(name, ranks, microbatches, chunks)
            yield from [] if found is None else [found]


def most_chunks(ranks: int, microbatches: int, layers: int) -> int:
    """Return the largest number of chunks per rank in these tables."""
    return max(1, min(CHUNKS, layers // ranks, max(IN_LOOPS.values()) // (ranks * microbatches)))


@lru_cache(maxsize=48)
def _runs(name: str, ranks: int, microbatches: int, chunks: int) -> BatchedSimulation | None:
    """Return the table, or None if there is none that is made in a short time."""
    how, most = schedule_by_name(name), {**SCHEDULES, **IN_LOOPS, **IN_A_V}[name]
    if ranks * microbatches * chunks > most or not how.holds(ScheduleSizes(ranks, microbatches, chunks)):
        return None
    try:
        return BatchedSimulation(how.build(ranks, microbatches, chunks))
    except ScheduleError:
        return None
