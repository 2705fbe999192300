"""Differences between training programs change the price of a step, and the account of a plan still adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cost import KernelTimes, cluster_of
from meshwright.search import Experts, Latent, Plan, Software, Transformer, hold, predict
from meshwright.search.transformer_plans.communication import communications
from meshwright.search.transformer_plans.software import RepeatedPart

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
SPARSE = Transformer(12, 2048, 16, 16, 128, 8192, 32000, experts=Experts(64, 6, 1408))
CLUSTER = cluster_of("H100")


def seconds(plan: Plan, model: Transformer = LLAMA, **software: Any) -> float:
    return float(predict(model, plan, CLUSTER, replace(Software(), **software)).seconds)


def bytes_by_collective(plan: Plan, what: str, model: Transformer = LLAMA, **software: Any) -> dict[str, float]:
    """Return bytes by collective, of the rows about one purpose."""
    rows = communications(model, plan, CLUSTER, replace(Software(), **software))
    return {f"{row.kind}, {row.where}": row.nbytes for row in rows if what in row.what}


def test_moments_of_8_bits_take_6_bytes_less_per_parameter() -> None:
    for zero in (0, 1, 3):
        plan = Plan(dp=8, zero=zero, batch=64)
        full, small = (hold(LLAMA, plan, Software(moments=m)).parts["optimizer"] for m in (12.0, 6.0))
        saved = float(np.asarray(full)) - float(np.asarray(small))
        assert saved == pytest.approx(6.0 * LLAMA.parameters / (8 if zero else 1), rel=0.01)


def test_an_all_reduce_of_gradients_takes_longer_than_a_reduce_scatter() -> None:
    plan = Plan(dp=64, zero=1, batch=64)
    assert seconds(plan, reduces_parts=False) > seconds(plan)
    assert seconds(replace(plan, zero=0), reduces_parts=False) == seconds(replace(plan, zero=0))
    assert seconds(replace(plan, zero=3), reduces_parts=False) == seconds(replace(plan, zero=3))
    assert {kind.split(",")[0] for kind in bytes_by_collective(plan, "over dp", reduces_parts=False)} == {
        "all-reduce",
        "all-gather",
    }
    assert {kind.split(",")[0] for kind in bytes_by_collective(plan, "over dp")} == {"reduce-scatter", "all-gather"}


def test_gathers_without_prefetch_are_exposed() -> None:
    plan = Plan(dp=64, zero=3, batch=64, recompute="full")
    layer = (LLAMA.parameters - 2 * LLAMA.embedding_parameters) / LLAMA.layers
    assert seconds(plan, live=layer * 1.01) == seconds(plan)
    alone, twice = seconds(replace(plan, recompute="none"), live=0.9 * layer), seconds(plan, live=0.9 * layer)
    assert alone > seconds(replace(plan, recompute="none"))
    assert twice - seconds(plan) > 1.2 * (alone - seconds(replace(plan, recompute="none")))


def test_offloaded_inputs_cost_transfers_and_no_memory() -> None:
    plan = Plan(dp=8, batch=64, recompute="full", sequence=4096)
    moved = 2 * 8 * LLAMA.layers * 4096 * 2 * LLAMA.hidden
    assert seconds(plan, stowed=1e9) - seconds(plan) == pytest.approx(moved / 1e9)
    assert seconds(replace(plan, recompute="none"), stowed=1e9) == seconds(replace(plan, recompute="none"))
    there, here = (float(np.asarray(hold(LLAMA, plan, Software(stowed=s)).nbytes)) for s in (1e9, None))
    assert here - there == pytest.approx(moved / 16)


def test_offloaded_states_cost_host_time_and_no_device_memory() -> None:
    plan = Plan(dp=8, zero=3, batch=64)
    own, hosted, stowed = LLAMA.parameters / 8, 4e11, 2e10
    here, there = seconds(plan), seconds(plan, hosted=hosted, stowed=stowed)
    kernels = KernelTimes(CLUSTER.device)
    update = own * 32 * 8 / (hosted * kernels.habits.streamed)
    assert there - here == pytest.approx(update + own * 6 / stowed - kernels.stream(own * 32))
    assert seconds(plan, hosted=hosted) < there, "pinned, gradients go as fast as a device's share of the memory"
    held = [float(np.asarray(hold(LLAMA, plan, Software(hosted=h, gradient=2.0)).nbytes)) for h in (None, hosted)]
    assert held[0] - held[1] == pytest.approx(own * 12)


def test_weights_cast_before_a_gather_are_sent_in_eight_bits() -> None:
    plan = Plan(tp=8, batch=8, sequence=8192, microbatch=4, sequence_parallel=True, precision="fp8")
    early, late = (bytes_by_collective(plan, "over tp", casts_first=first) for first in (True, False))
    assert {kind: nbytes * 0.75 for kind, nbytes in late.items()} == early
    assert seconds(plan, casts_first=False) > seconds(plan)
    for other in (replace(plan, precision="bf16"), replace(plan, tp=1, sequence_parallel=False)):
        assert seconds(other, casts_first=False) == seconds(other)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_tensor_parallel_group_divides_the_tokens_of_experts(tp: int) -> None:
    """Each rank of a group sends its own part of the tokens, and computes the tokens that its own experts receive."""
    alone = Plan(dp=8, ep=8, batch=64, sequence=16384)
    together = replace(alone, dp=8 // tp, tp=tp, batch=64 // tp)
    one, several = (sum(bytes_by_collective(plan, "over ep", SPARSE).values()) for plan in (alone, together))
    assert several == pytest.approx(one / tp)
    assert seconds(together, SPARSE) < seconds(alone, SPARSE)


def test_a_token_is_sent_once_to_a_rank_and_once_to_a_node() -> None:
    within, beyond = (Plan(dp=n, ep=n, batch=64, sequence=16384) for n in (8, 64))
    for plan in (within, beyond):
        several, once = (sum(bytes_by_collective(plan, "over ep", SPARSE, once=o).values()) for o in (False, True))
        assert once / several == pytest.approx(plan.ep * (1 - (1 - 1 / plan.ep) ** 6) / 6)
        assert seconds(plan, SPARSE, once=True) < seconds(plan, SPARSE)
    single = replace(SPARSE, experts=Experts(64, 1, 1408))
    assert seconds(beyond, single, once=True) == pytest.approx(seconds(beyond, single))


def test_a_limit_of_nodes_shortens_the_exchange_between_nodes_only() -> None:
    within, beyond = (Plan(dp=n, ep=n, batch=64, sequence=16384) for n in (8, 64))
    limited = replace(SPARSE, experts=Experts(64, 6, 1408, nodes=2))
    assert seconds(beyond, limited, once=True) < seconds(beyond, SPARSE, once=True)
    assert seconds(within, limited, once=True) == seconds(within, SPARSE, once=True)


def test_an_exchange_beside_other_work_is_exposed_in_part() -> None:
    plan = Plan(dp=8, ep=8, batch=64, sequence=16384)
    rows = [r for r in communications(SPARSE, plan, CLUSTER, Software(exchange=0.25)) if r.kind == "all-to-all"]
    whole, shown = (sum(times) for times in ((r.seconds for r in rows), (r.exposed or 0.0 for r in rows)))
    assert shown == pytest.approx(whole / 4)
    assert 0.5 * whole < seconds(plan, SPARSE) - seconds(plan, SPARSE, exchange=0.25) < 0.75 * whole
    shared = replace(SPARSE, experts=Experts(64, 6, 1408, 1408))
    gain = seconds(plan, shared) - seconds(plan, shared, beside_shared=True)
    assert 0 < gain < whole
    assert seconds(plan, SPARSE, dispatched=1.0) < seconds(plan, SPARSE)


def test_graphs_take_the_time_of_the_host_away() -> None:
    """Small layers take the time that the host needs to start them; it starts experts one by one."""
    plan = Plan(dp=8, ep=8, batch=8, sequence=64)
    small = replace(SPARSE, hidden=256)
    told = [
        seconds(plan, small, graphs=frozenset(parts))
        for parts in ((), ("attention",), ("attention", "router"), ("attention", "router", "experts"))
    ]
    assert told == sorted(told, reverse=True)
    assert len(set(told)) == 4
    assert seconds(plan, small, fused_experts=True) < told[0]
    assert seconds(replace(plan, ep=1), small) > told[0], "a rank with all experts starts more of them"


def test_experts_that_are_recomputed_exchange_their_tokens_again() -> None:
    plan, again = Plan(dp=8, ep=8, batch=64, recompute="selective"), Software(repeated=frozenset({"experts"}))
    rows = [r for r in communications(SPARSE, plan, CLUSTER, again) if r.kind == "all-to-all"]
    assert [r.where.rpartition(" ")[2] for r in rows] == ["forward", "backward", "recomputed"]


@pytest.mark.parametrize("part", ["scores", "up-projections", "norms", "activation", "experts", "shared expert"])
def test_a_repeated_part_takes_time_again(part: RepeatedPart) -> None:
    model = replace(SPARSE, experts=Experts(64, 6, 1408, 1408), latent=Latent(1536, 512, 128, 64, 128))
    plan = Plan(dp=8, ep=8, batch=64, sequence=4096)
    selective = replace(plan, recompute="selective")
    assert seconds(selective, model, repeated=frozenset()) == seconds(plan, model)
    once, full = seconds(selective, model, repeated=frozenset({part})), seconds(replace(plan, recompute="full"), model)
    assert seconds(plan, model) < once < full


def test_a_token_that_is_predicted_ahead_takes_a_layer_and_the_head() -> None:
    ahead = replace(SPARSE, ahead=1)
    more = replace(SPARSE, layers=SPARSE.layers + 1)
    plan = Plan(dp=8, ep=8, batch=64, sequence=4096, zero=1)
    assert ahead.parameters == more.parameters + 2 * SPARSE.hidden**2
    assert seconds(plan, SPARSE) < seconds(plan, more) < seconds(plan, ahead)
    staged = replace(plan, pp=2, dp=4, ep=4)
    assert seconds(staged, SPARSE) < seconds(staged, ahead)
