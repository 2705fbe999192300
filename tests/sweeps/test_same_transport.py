"""The figure `same_transport`: its contenders give the same losses over Gloo, and their collectives are counted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import same_transport, static_speed

pytestmark = pytest.mark.usefixtures("forked_processes")

UNCOMPILED = {"STATIC_SPEED_UNCOMPILED": "1"}


def test_no_contender_makes_fewer_collectives_than_ours() -> None:
    """The first eight steps make more calls, since they agree on when to compare replicas."""
    found = static_speed.measure(static_speed.Case("smallest", dp=1, tp=2, gloo=True), turns=4, env=UNCOMPILED)
    assert static_speed.agree(found), found
    counts = {name: seen["calls"] for name, seen in found["gloo"].items()}
    assert counts["ours"] == min(counts.values())
    assert all(seen["bytes"] > 0 for seen in found["gloo"].values())


def row(ratios: dict[str, float], calls: dict[str, int]) -> dict[str, Any]:
    gloo = {name: {"calls": count, "bytes": 1} for name, count in calls.items()}
    return {"ratios": ratios, "gloo": gloo, "failed": {}, "loss_difference": {"ours": 0.0}}


def test_the_figure_takes_the_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    beside_torch = {
        "a": row({"eager / torch": 0.9, "static / torch, compiled": 0.8}, {"eager": 4, "torch": 5}),
        "b": row({"eager / torch": 0.7}, {"eager": 2, "torch": 2}),
    }
    by_hand = {"c": row({"ours / by hand": 0.5, "ours / DTensor": 3.0}, {"ours": 12, "by hand": 11})}
    monkeypatch.setattr(same_transport, "measured", lambda quick: {"torch": beside_torch, "by hand": by_hand})
    found = same_transport.run()
    assert found["value"] == {"ours / torch": 0.9, "ours / by hand": 0.5}
    assert found["rival"] == {"collectives": {"ours / torch": 1.0, "ours / by hand": 1.091}}
    assert found["ok"]
    by_hand["d"] = row({"ours / by hand": 1.1}, {"ours": 12, "by hand": 11})
    assert not same_transport.run()["ok"]


def test_a_case_without_a_ratio_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"failed": {"all": "the processes ended with status 1"}}
    rows = {"torch": {"a": broken}, "by hand": {"c": broken}}
    monkeypatch.setattr(same_transport, "measured", lambda quick: rows)
    assert not same_transport.run()["ok"]
