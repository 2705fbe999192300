"""Facts about schedules agree with their tables: chunks, places, and microbatches in flight on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost import cluster_of
from meshwright.pipeline import ChunkMemory, peaks, schedule_by_name
from meshwright.search import Plan, SearchError, Transformer, choose, predict, simulate_step
from meshwright.search.transformer_plans.schedule_facts import SCHEDULE_FACTS, microbatches_in_flight, placement

HALF_KEPT = ChunkMemory(kept=0.5)
"""Gradients of weights need about half of what a forward keeps."""
ONE_MORE = {"ZB-2p": 1}
"""Our table of ZB-2p fills a limit of 2p microbatches; the runs of its authors held 2p - 1."""
ROUGH = {"V-Half": 0.8, "V-Min": 0.8}
"""Largest error of closed forms that only decide which tables are simulated."""
MODEL = Transformer(13, 1024, 16, 8, 64, 2816, 32000)


@pytest.mark.parametrize("name", SCHEDULE_FACTS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_the_facts_about_a_schedule_are_those_of_its_table(name: str, ranks: int) -> None:
    facts, how = SCHEDULE_FACTS[name], schedule_by_name(name)
    for count in (ranks, 2 * ranks, 3 * ranks, 2 * ranks + 1):
        for chunks in (facts.chunks,) if facts.chunks else (2, 3):
            if not np.all(facts.fits(ranks, count, chunks)):
                continue
            table = how.build(ranks, count, chunks)
            assert table.ways == (placement(name, ranks, chunks),)
            held = [most / chunks for most in peaks(table, HALF_KEPT)]
            told = [float(microbatches_in_flight(name, ranks, count, chunks, rank)) for rank in range(ranks)]
            more = ONE_MORE.get(name, 0) + 1e-9
            assert all(x <= y + more for x, y in zip(held, told, strict=True)), (count, chunks, held, told)


@pytest.mark.parametrize("name", SCHEDULE_FACTS)
def test_every_schedule_is_priced_searched_and_simulated(name: str) -> None:
    chunks = SCHEDULE_FACTS[name].chunks or 3
    plan = Plan(dp=2, pp=4, chunks=chunks, schedule=name, batch=32, sequence=1024)
    told, simulated = (
        float(predict(MODEL, plan, cluster_of("H100")).seconds),
        simulate_step(MODEL, plan, cluster_of("H100")),
    )
    assert told == pytest.approx(simulated, rel=ROUGH.get(name, 0.35))
    found = choose(MODEL, cluster_of("H100"), 8, 32, 1024, schedule=name, pp=4)
    assert (found.best.plan.schedule, found.best.plan.pp) == (name, 4)
    with pytest.raises(SearchError, match="chunks"):
        predict(MODEL, Plan(pp=4, chunks=7 if chunks != 7 else 1, schedule="ZB-V"), cluster_of("H100"))
