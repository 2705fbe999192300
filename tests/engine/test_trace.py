"""`trace_comm`: every call in order, with the line and the module that need it, forward and backward."""

from __future__ import annotations

import inspect
import json

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.engine import CommTrace
from meshwright.tensor.core.call_sites import _Asking

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        return self.b(hidden)


def line_of(function: object, text: str) -> str:
    lines, begin = inspect.getsourcelines(function)
    (at,) = (begin + n for n, line in enumerate(lines) if text in line)
    return f"{__file__}:{at}"


def step() -> tuple[CommTrace, int, list[str]]:
    net = nn.Sequential(Block(), Block())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    mw.parallelize(net, sgd, MESH, mw.Parallelism({"*.a": mw.ColwiseParallel(), "*.b": mw.RowwiseParallel()}))
    before = current_communicator().seen.total_received
    with current_communicator().seen.record_calls() as calls, mw.trace_comm() as trace:
        loss = net(torch.ones(6, 8)).square().mean()
        loss.backward()
        sgd.step()
    return trace, current_communicator().seen.total_received - before, [str(call) for call in calls]


def test_each_call_has_the_line_that_needs_it() -> None:
    for rank, (trace, received, calls) in enumerate(mw.simulate(step, 4)):
        assert trace.rank == rank
        assert trace.received == received
        assert [call.text for call in trace.calls] == calls
        a, b = line_of(Block.forward, "self.a(x)"), line_of(Block.forward, "self.b(hidden)")
        found = [(c.stage, c.step, c.axes, c.line, c.module) for c in trace.calls]
        assert found == [
            ("forward", "AllReduce(tp)", ("tp",), a, "1.a"),
            ("forward", "AllReduce(tp)", ("tp",), line_of(step, "net(torch.ones"), ""),
            ("backward", "AllReduce(dp)", ("dp",), b, "1.b"),
            ("backward", "AllReduce(tp)", ("tp",), a, "1.a"),
            ("backward", "AllReduce(dp)", ("dp",), b, "0.b"),
            ("gradients", "AllReduce(dp)", ("dp",), line_of(step, "sgd.step"), ""),
        ]
        assert {c.at for c in trace.calls if c.stage == "backward"} == {line_of(step, "loss.backward")}


def test_it_prints_a_table_and_json() -> None:
    trace, *_ = mw.simulate(step, 4)[2]
    head, first, *_, last = str(trace).splitlines()
    at = line_of(Block.forward, "self.a(x)").rpartition("/")[2]
    assert head.split() == ["call", "by", "over", "bytes", "pass", "line", "module"]
    assert first.split() == ["1", "all_reduce", "AllReduce(tp)", "tp", "96", "forward", at, "1.a"]
    assert last == f"rank 2: {len(trace.calls)} calls, {trace.received} bytes received"
    told = json.loads(trace.to_json())
    assert told["rank"] == 2
    assert [call["kind"] for call in told["calls"]] == [call.kind for call in trace.calls]
    assert str(CommTrace(0)) == "rank 0: no communication"


def test_other_calls_are_listed_with_their_ranks() -> None:
    def program() -> CommTrace:
        with mw.trace_comm() as trace:
            current_communicator().barrier((0, 1, 2))
            mw.unshard_dtensor(mw.shard_tensor(torch.ones(5, 3), MESH, [mw.Shard(0), mw.Shard(1)]))
        return trace

    trace = mw.simulate(
        lambda: (
            program()
            if mw.get_rank() < 3
            else mw.unshard_dtensor(mw.shard_tensor(torch.ones(5, 3), MESH, [mw.Shard(0), mw.Shard(1)]))
        ),
        4,
    )[0]
    assert "ranks 0, 1, 2" in str(trace)
    assert trace.calls[1].axes == ("dp", "tp") or trace.calls[1].axes == ("tp",)


def test_gradients_of_earlier_calls_name_the_backward_line() -> None:
    def program() -> tuple[CommTrace, int]:
        w = mw.shard_tensor(torch.ones(8, 4), MESH, [mw.Replicate(), mw.Shard(0)]).requires_grad_()
        x = mw.shard_tensor(torch.ones(6, 8, requires_grad=True), MESH, [mw.Shard(0), mw.Shard(1)])
        out = torch.relu(x @ w).sum()
        with mw.trace_comm() as trace:
            out.backward()
            w.grad  # noqa: B018 - looking at it reduces it
            asking = _Asking.count
        return trace, asking

    trace, asking = mw.simulate(program, 4)[0]
    assert asking >= 1
    assert _Asking.count == 0
    line = line_of(test_gradients_of_earlier_calls_name_the_backward_line, "out." + "backward()")
    assert all(call.line == line for call in trace.calls if call.stage == "backward")
    assert [call.stage for call in trace.calls][-1] == "gradients"
