"""A run as a trace file: every rank, every kind of work, by the names of the user's modules; messages as arrows."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import meshwright as mw
from meshwright.engine import CommTrace

SQUARE = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
STAGES = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
PLAN = mw.Parallelism({"*.a": mw.ColwiseParallel(), "*.b": mw.RowwiseParallel()})
Events = list[dict[str, Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def eager() -> CommTrace:
    model = net()
    adam = torch.optim.AdamW(model.parameters())
    mw.parallelize(model, adam, SQUARE, PLAN)
    with mw.trace_comm() as trace:
        model(torch.ones(6, 8)).square().mean().backward()
        adam.step()
    return trace


def third_step(step: mw.DistModel, x: Tensor) -> CommTrace:
    """Return the trace of the third step, because the first one makes the optimizer's states."""
    for _ in range(2):
        step(x, x)
    with mw.trace_comm() as trace:
        step(x, x)
    return trace


def static() -> CommTrace:
    model = net()
    adam = torch.optim.AdamW(model.parameters())
    mw.parallelize(model, adam, SQUARE, PLAN)
    return third_step(mw.to_static(model, loss=mse_loss, optimizer=adam), torch.ones(6, 8))


def pipeline() -> CommTrace:
    model = mw.split_pipeline(net(), STAGES, batch=[mw.Shard(0)])
    options = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 4})
    step = mw.to_static(model, loss=mse_loss, optimizer=torch.optim.AdamW(model.parameters()), strategy=options)
    return third_step(step, torch.ones(16, 8))


def eager_pipeline() -> CommTrace:
    model = mw.split_pipeline(net(), STAGES, batch=[mw.Shard(0)])
    run = mw.microbatched(model, mse_loss, STAGES, 4)
    x = torch.ones(16, 8)
    with mw.trace_comm() as trace:
        run(x, x)
    return trace


def events_of(program: Callable[[], CommTrace], path: Path) -> Events:
    mw.simulate(lambda: program().save(path), 4)
    found = json.loads(path.read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    return found["traceEvents"]


@pytest.mark.parametrize("program", [eager, static, pipeline, eager_pipeline])
def test_a_file_is_a_trace_of_all_ranks(program: Callable[[], CommTrace], tmp_path: Path) -> None:
    events = events_of(program, tmp_path / "trace.json")
    assert {e["ph"] for e in events} <= {"M", "X", "s", "f"}
    named = {(e["name"], e["pid"]) for e in events if e["ph"] == "M"}
    assert {(name, rank) for name in ("process_name", "thread_name") for rank in range(4)} <= named
    lasting = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["name"] == e["name"].strip() for e in lasting)
    for rank in range(4):
        for row in range(3):
            assert_nested([e for e in lasting if (e["pid"], e["tid"]) == (rank, row)])
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert all(starts[n]["ts"] <= ends[n]["ts"] for n in starts)
    assert bool(starts) == (program in (pipeline, eager_pipeline))
    assert len(starts) == len([e for e in events if e["ph"] == "s"])


def assert_nested(events: Events) -> None:
    """Check that each event of a row ends before the next begins, or within it."""
    for e, after in pairwise(sorted(events, key=lambda e: (e["ts"], -e["dur"]))):
        apart = after["ts"] >= e["ts"] + e["dur"] - 0.01
        inside = after["ts"] + after["dur"] <= e["ts"] + e["dur"] + 0.01
        assert apart or inside, (e, after)


def names(events: Events, rank: int, kind: str) -> list[str]:
    return [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == kind]


def test_modules_are_named_forward_and_backward(tmp_path: Path) -> None:
    events = events_of(eager, tmp_path / "trace.json")
    passes = ["Sequential", "0", "0.a", "0.b", "1", "1.a", "1.b"]
    for rank in range(4):
        assert names(events, rank, "forward") == [f"forward {name}" for name in passes]
        assert names(events, rank, "backward") == [f"backward {name}" for name in "1 1.b 1.a 0 0.b 0.a".split()]
        assert names(events, rank, "update") == ["update AdamW"]
        assert "AllReduce(tp) 1.a" in names(events, rank, "all_reduce")


def test_a_program_is_named_and_its_collectives_have_module_names(tmp_path: Path) -> None:
    events = events_of(static, tmp_path / "trace.json")
    for rank in range(4):
        assert names(events, rank, "program") == ["program train Sequential"]
        found = {(e["name"], e["args"]["pass"]) for e in events if e["ph"] == "X" and e["cat"] == "all_reduce"}
        assert {("AllReduce(tp) 1.a", "forward"), ("AllReduce(tp) 1.a", "backward")} <= found
        lines = {e["args"]["line"] for e in events if e.get("cat") == "all_reduce"}
        assert all(line.startswith(__file__) for line in lines)


def test_a_pipelines_actions_are_named_by_microbatch_and_modules(tmp_path: Path) -> None:
    events = events_of(pipeline, tmp_path / "trace.json")
    for rank in range(4):
        found = names(events, rank, "pipeline")
        block = rank // 2
        assert {f"pipeline {kind}{m}.{block} {block}.a … {block}.b" for kind in "FBW" for m in range(4)} <= {*found}
        assert found[-1] == "pipeline after all microbatches"
    events = events_of(eager_pipeline, tmp_path / "trace.json")
    assert {f"pipeline {kind}{m}" for kind in ("F", "BW") for m in range(4)} == {*names(events, 0, "pipeline")}
    assert names(events, 0, "forward").count("forward 0.a") == 4


def test_a_trace_costs_nothing_after_its_block() -> None:
    def program() -> int:
        model = net()
        with mw.trace_comm() as trace:
            model(torch.ones(6, 8)).sum().backward()
        before = len(trace.works)
        model(torch.ones(6, 8)).sum().backward()
        return len(trace.works) - before

    assert mw.simulate(program, 2) == [0, 0]
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_file_replaces_another_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full_disk(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="No space"):
            mw.simulate(lambda: eager().save(path), 4)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("trace.json", "old")]
