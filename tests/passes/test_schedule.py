"""Overlap: the same bits in another order, collectives that start early and end late, and prefetched gathers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm import DelayedCommunicator, current_communicator, using_communicator
from meshwright.cost import Cluster, Device, Link
from meshwright.graph import (
    Conversion,
    Draft,
    Input,
    Node,
    Origin,
    Program,
    Start,
    Value,
    Wait,
    communication,
    live_memory,
    name_of,
)
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.passes import InPlace, OverlapSchedule
from meshwright.reshard import AllGather, AllReduce

from .steps import assert_same, llama_step

aten = torch.ops.aten
DEVICE = Device("toy", {torch.float32: 1e9}, bandwidth=1e9, memory=1e9, overhead=1.0, reach=1.0)
SLOW = Cluster(DEVICE, Link("wire", 1e12, 0.0, start=2.0, reach=1.0))
"""An operator takes one second, and a collective two."""


def toy(build: Any) -> Program:
    """Return a program with one input, whose outputs `build(add, send, x)` makes."""
    mesh = ProcessMesh([0, 1], ["dp"])
    pending, cut = parse_spec("f32[4] +dp", mesh), parse_spec("f32[8@dp]", mesh)
    given = Input(Value("x", (4,), torch.float32), "parameter", "x")
    draft = Draft(Program((given,), (), ()))

    def add(op: Any, *args: Any) -> Any:
        return draft.add(op, *args, before=draft.end, origin=Origin())

    def reduce(x: Value) -> Any:
        return add(Conversion(AllReduce(("dp",)), pending), x)

    def gather(x: Value) -> Any:
        return add(Conversion(AllGather((("dp", 0),)), cut), x)

    out = build(add, reduce, gather, given.value)
    return Program((given,), tuple(Node(s.op, s.args, s.kwargs, s.out, s.origin) for s in draft), out)


def order(program: Program) -> list[str]:
    return [
        type(n.op).__name__.lower() if isinstance(n.op, (Start, Wait)) else name_of(n.op).split(".")[1]
        for n in program.nodes
    ]


def test_independent_nodes_run_while_a_collective_is_in_flight() -> None:
    def build(add: Any, reduce: Any, gather: Any, x: Value) -> Any:
        weight = add(aten.neg.default, x)  # is needed only at the end
        value = add(aten.exp.default, x)
        return weight, add(aten.abs.default, reduce(value))

    program = toy(build)
    scheduled = OverlapSchedule(SLOW)(program)
    assert order(scheduled) == ["exp", "start", "neg", "wait", "abs"]
    (told,) = scheduled.changes
    assert told.saved["seconds"] == pytest.approx(1.0)  # neg is hidden: 5 seconds become 4
    assert "1 collectives started earlier" in told.what


def test_gathers_are_prefetched() -> None:
    def build(add: Any, reduce: Any, gather: Any, x: Value) -> Any:
        y = x
        for _ in range(3):
            whole = gather(x)
            y = add(aten.add.Tensor, add(aten.exp.default, y), add(aten.sum.default, whole))
        return y

    first, *_ = scheduled = order(OverlapSchedule(SLOW)(toy(build)))
    assert first == "start"
    assert scheduled.index("wait") > scheduled.index("exp")
    near = order(OverlapSchedule(SLOW, windows=(0,))(toy(build)))
    assert [name for name in near if name in ("start", "wait")] == ["start", "wait"] * 3


@pytest.mark.parametrize(("spec", "first"), [("f32[4@dp]", "start"), ("f32[5@dp]", "exp"), ("", "exp")])
def test_a_gather_passes_a_reduction_that_is_not_ready(spec: str, first: str) -> None:
    """It does so only if all ranks are known to have parts of the same shape."""

    def build(add: Any, reduce: Any, gather: Any, x: Value) -> Any:
        late = x
        for _ in range(4):
            late = add(aten.exp.default, late)
        total = reduce(late)
        return add(aten.abs.default, total), add(aten.sum.default, gather(x))

    program = toy(build)
    known = {program.inputs[0].value: parse_spec(spec, ProcessMesh([0, 1], ["dp"]))} if spec else {}
    scheduled = OverlapSchedule(SLOW)(replace(program, specs=known))
    assert order(scheduled)[0] == first
    (told,) = scheduled.changes
    seconds = 10 - told.saved["seconds"]
    assert seconds == pytest.approx(7 if first == "start" else 9)


def test_a_memory_cap_limits_prefetching() -> None:
    def build(add: Any, reduce: Any, gather: Any, x: Value) -> Any:
        return [add(aten.sum.default, add(aten.exp.default, gather(x))) for _ in range(8)]

    program = toy(build)
    free = OverlapSchedule(SLOW)(program)
    cap = (live_memory(program).peak + live_memory(free).peak) // 2
    capped = OverlapSchedule(SLOW, memory=cap)(program)
    assert live_memory(capped).peak <= cap < live_memory(free).peak
    assert OverlapSchedule(SLOW, memory=1)(program) is program


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2)])
def test_a_step_keeps_its_bits(shape: tuple[int, int, int]) -> None:
    step = llama_step(shape)
    programs = step.changed(OverlapSchedule())
    assert_same(step, programs)
    assert_same(step, step.changed(lambda p: InPlace()(OverlapSchedule()(p))))
    orders = [[n.op.carry for n in communication(after)] for after in programs]
    assert all(order == orders[0] for order in orders)
    for before, after in zip(step.programs, orders, strict=True):
        assert sorted(map(repr, after)) == sorted(repr(n.op) for n in communication(before))


def test_operands_stay_until_the_end_of_a_collective() -> None:
    def build(add: Any, reduce: Any, gather: Any, x: Value) -> Any:
        value = add(aten.exp.default, x)
        return add(aten.abs.default, reduce(value)), add(aten.neg.default, value)

    program = InPlace()(OverlapSchedule(SLOW)(toy(build)))
    assert order(program) == ["exp", "start", "neg", "wait", "abs_"]


def test_a_delayed_communicator_overlaps_with_computation() -> None:
    def build(add: Any, reduce: Any, gather: Any, x: Value) -> Any:
        return reduce(add(aten.exp.default, x))

    plan_of = toy(build).nodes[1].op

    def rank() -> list[float]:
        assert isinstance(plan_of, Conversion)
        way = plan_of.of_part((4,))
        spent: list[float] = []
        with using_communicator(DelayedCommunicator(current_communicator(), latency=0.05, bandwidth=1e9)):
            began = time.monotonic()
            arrival = current_communicator().start(way, torch.ones(4))
            spent.append(time.monotonic() - began)
            assert torch.equal(arrival.wait(), torch.full((4,), 2.0))
            spent.append(time.monotonic() - began)
            assert torch.equal(current_communicator().convert(way, torch.ones(4)), torch.full((4,), 2.0))
            spent.append(time.monotonic() - began)
        return spent

    begun, waited, again = mw.simulate(rank, 2)[0]
    assert begun < waited
    assert waited >= 0.05
    assert again >= 0.1
