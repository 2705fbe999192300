"""Tables simulated with many times at once, compared with the simulator for one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from meshwright.comm import current_communicator
from meshwright.comm import simulate as simulate_ranks
from meshwright.graph import Conversion, Value
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    BatchedSimulation,
    ChunkMemory,
    Schedule,
    Times,
    peaks,
    simulate_schedule,
)
from meshwright.pipeline.partition.step_parts import Crossing, PartPlace
from meshwright.pipeline.runtime.runner import _message
from meshwright.reshard import Exchange

CASES = 5


def made(name: str) -> Schedule:
    how = KNOWN_SCHEDULES[name]
    numbers = (4, 4) if name == "Chimera" else (4, 8)
    return how.build(*numbers, 2)


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
def test_many_times_at_once_equal_each_alone(name: str) -> None:
    table, draw = made(name), random.Random(0)
    rows = [[[draw.uniform(0.5, 2) for _ in range(CASES)] for _ in range(table.chunks)] for _ in range(5)]
    runs = BatchedSimulation(table)
    arrays = [tuple(map(np.array, row)) for row in rows]
    seconds = runs.makespans(Times(*arrays[:4], overhead=0.1, slowdown=0.8))  # pyright: ignore[reportArgumentType] - arrays
    held = runs.peaks(np.array(rows[4]))
    for n in range(CASES):
        forward, backward, weight, transfer, each = (tuple(chunk[n] for chunk in row) for row in rows)
        line = simulate_schedule(table, Times(forward, backward, weight, transfer, overhead=0.1, slowdown=0.8))
        assert seconds[n] == pytest.approx(line.makespan)
        assert held[:, n] == pytest.approx(peaks(table, ChunkMemory(held=each)))


def test_a_rank_on_both_meshes_keeps_its_own_part_of_a_message() -> None:
    source, target = ProcessMesh([0, 1], ["x"]), ProcessMesh([1, 0], ["x"])
    spec, to = parse_spec("f32[6@x, 2]", source), parse_spec("f32[6, 2@x]", target)
    a, b = (Value(name, (6, 2), torch.float32) for name in "ab")
    crossing = Crossing(Conversion(Exchange(to), spec), a, b, PartPlace("F", 0), PartPlace("F", 1), 0)
    whole = torch.arange(12.0).view(6, 2)

    def on_rank() -> torch.Tensor:
        here = current_communicator()
        message = _message(crossing, here.rank)
        held: dict[Value, torch.Tensor] = {a: whole[3 * here.rank : 3 * here.rank + 3]}
        message.send({}, held, here, 0)
        message.receive(held, here, 0)
        return held[b]

    found = simulate_ranks(on_rank, 2)
    assert [x.tolist() for x in found] == [whole[:, 1:].tolist(), whole[:, :1].tolist()]
