"""Static pipelines give the numbers of one device under every placement, and raise errors for wrong options."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.engine import StaticError, StrategyError
from meshwright.graph import capture, complete, copy_batch_inputs, with_layouts
from meshwright.pipeline import ScheduleError, StageError, check_schedule, chunk_times, one_f_one_b, split_stages

from .oracle import STEPS, Chain, alone, batch, compare, laid, loss_of, piped

runner_module: Any = import_module("meshwright.pipeline.runtime.runner")

CASES = [
    ("1F1B", (0, 1), 2, False),
    ("GPipe", (0, 1), 4, True),
    ("ZB-H1", (0, 1, 2, 3), 4, True),
    ("ZB-2p", (0, 1), 3, False),
    ("1F1B", (0, 1, 2, 3), 2, False),
    ("Interleaved 1F1B", (0, 1, 0, 1), 4, True),
    ("ZB-V", (0, 1, 1, 0), 4, True),
    ("V-Min", (0, 1, 2, 2, 1, 0), 6, False),
]


@pytest.mark.parametrize(("name", "way", "microbatches", "tied"), CASES)
def test_numbers_are_those_of_one_device(name: str, way: tuple[int, ...], microbatches: int, tied: bool) -> None:
    options = {"schedule_mode": name, "accumulate_steps": microbatches}
    rows = 2 * microbatches
    found = mw.simulate(lambda: piped(way, options, rows, tied), max(way) + 1)
    expected = alone(len(way), microbatches, rows, tied)
    for each in found:
        compare(each, expected)


@pytest.mark.parametrize(("name", "way"), [("DualPipe", (0, 1)), ("Chimera", (0, 1, 2, 3)), ("DualPipe", (0, 1, 2, 3))])
def test_a_schedule_with_two_copies_of_a_model(name: str, way: tuple[int, ...]) -> None:
    microbatches = 2 * len(way)
    options = {"schedule_mode": name, "accumulate_steps": microbatches}
    found = mw.simulate(lambda: piped(way, options, 2 * microbatches, True, buffers=False), len(way))
    for each in found:
        compare(each, alone(len(way), microbatches, 2 * microbatches, True, buffers=False))


def test_stages_of_several_ranks() -> None:
    options = {"schedule_mode": "ZB-H1", "accumulate_steps": 4}
    found = mw.simulate(lambda: piped((0, 1), options, 8, True, ranks_per_stage=2), 4)
    for each in found:
        compare(each, alone(2, 4, 8, True))


def test_the_schedule_is_chosen() -> None:
    def chosen() -> Any:
        return piped((0, 1), {"accumulate_steps": 4}, 8, True, then=lambda dist: dist.pipeline)

    for each in mw.simulate(chosen, 2):
        compare(each, alone(2, 4, 8, True))
        found = each[2]
        assert found.schedule.microbatches == 4
        assert found.schedule.name in found.why
        assert "makespan" in found.why


@pytest.mark.parametrize("capacity", [1.0, 2.0])
def test_the_chosen_schedule_fits_into_memory(capacity: float) -> None:
    def chosen() -> Any:
        return piped((0, 1), {"accumulate_steps": 4, "capacity": capacity}, 8, then=lambda dist: dist.pipeline)

    assert max(check_schedule(mw.simulate(chosen, 2)[0][2].schedule)) == capacity


def test_the_times_of_chunks_are_counted() -> None:
    """A chunk without trained weights has no W, and one without an input gradient no B.

    Each gradient of a matrix product takes as long as the forward product.
    """

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
            self.second.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            homes = [mw.ProcessMesh([stage], ["dp"]) for stage in range(2)]
            x = mw.reshard(x, homes[0], [mw.Replicate()])
            return self.second(mw.reshard(self.first(x), homes[1], [mw.Replicate()]))

    def times() -> Any:
        net = Two()
        captured = capture(net, net, (torch.ones(4, 8),))
        program = copy_batch_inputs(captured.program)
        program, stages = split_stages(with_layouts(program, complete(program, {})))
        return chunk_times(program, stages, {"first.weight"})

    found = mw.simulate(times, 2)[0]
    assert found.of_chunk(0) == (1.0, 1e-3, 1.0)
    assert found.of_chunk(1) == (1.0, 1.0, 1e-3)


@pytest.mark.parametrize("how", ["pipeline", "merge"])
def test_batches_of_many_sizes(how: str) -> None:
    options: dict[str, Any] = {"pipeline": {"enable": True, "accumulate_steps": 2}}
    if how == "merge":
        options = {"gradient_merge": {"enable": True, "k_steps": 2}}

    def losses(homes: int) -> list[float]:
        torch.manual_seed(1)
        model = Chain(2, buffers=False)
        if not homes:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            pieces = [zip(*(x.chunk(2) for x in batch(n, size)), strict=True) for n, size in enumerate(SIZES)]
            return [sum(loss_of(model(*given), labels).item() / 2 for *given, labels in each) for each in pieces]
        laid(model, (0, 1), 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        dist = mw.to_static(
            model,
            None,
            lambda out, labels: loss_of(out, mw.reshard(labels, model.homes[-1], [mw.Replicate()])),
            optimizer,
            mw.Strategy.of(**options),
        )
        return [dist(*inputs, labels).item() for *inputs, labels in map(batch, range(4), SIZES)]

    for found in mw.simulate(losses, 2, 2):
        assert found == pytest.approx(losses(0), rel=1e-5)


SIZES = (4, 8, 12, 6)
FORMS = [((2, 4), (3, 5), (2, 4), (1, 7)), ((3, 5), (2, 4), (2, 4), (2, 4))]
"""Rows and lengths of the microbatches of each step."""


@pytest.mark.parametrize(
    ("name", "way", "tied"), [("1F1B", (0, 1), True), ("ZB-V", (0, 1, 1, 0), True), ("DualPipe", (0, 1), False)]
)
def test_microbatches_of_many_sizes(name: str, way: tuple[int, ...], tied: bool) -> None:
    """Buffers pass from one microbatch to the next, although every step has other sizes in another order."""
    buffers = name != "DualPipe"

    def train(homes: bool) -> list[Any]:
        torch.manual_seed(1)
        model = Chain(len(way), tied, buffers)
        if homes:
            laid(model, way, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = {"enable": True, "schedule_mode": name, "accumulate_steps": 4}
        dist = mw.to_static(
            model,
            None,
            lambda out, labels: loss_of(out, mw.reshard(labels, model.homes[-1], [mw.Replicate()])),
            optimizer,
            mw.Strategy.of(pipeline=options),
        )
        losses: list[float] = []
        for step, sizes in enumerate(FORMS):
            batches = [batch(10 * step + m, *size) for m, size in enumerate(sizes)]
            if homes:
                losses.append(dist.accumulate(batches).item())
                continue
            total = sum(loss_of(model(*inputs), labels) / len(batches) for *inputs, labels in batches)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
        return [losses, {name: mw.unshard_dtensor(x.detach()) for name, x in model.state_dict().items()}]

    for found in mw.simulate(lambda: train(True), max(way) + 1):
        compare(found, train(False))


@pytest.mark.parametrize(
    ("batches", "options", "says"),
    [
        ([batch(0, 2)] * 3, {"pipeline": {"enable": True, "accumulate_steps": 4}}, "accumulate_steps = 4"),
        ([batch(0, 2)], {}, "no pipeline"),
        ([batch(0, 2), batch(0, 2)[:2]], {"pipeline": {"enable": True, "accumulate_steps": 2}}, "same structure"),
    ],
)
def test_batches_that_are_no_microbatches_are_refused(batches: Any, options: dict[str, Any], says: str) -> None:
    model = Chain(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist = mw.to_static(model, None, loss_of, optimizer, mw.Strategy.of(**options))
    with pytest.raises(StaticError, match=says):
        dist.accumulate(batches)


RECOMPUTED = """\
1F1B with R: 2 microbatches
way: 0 1
0: F0.0 F1.0 R0.0 B0.0 W0.0 BW1.0
1: F0.1 R0.1 BW0.1 F1.1 R1.1 B1.1 W1.1
"""


def test_recompute_is_placed_by_the_table() -> None:
    def once(text: str) -> Any:
        ran: list[Any] = []
        options = {"schedule_mode": text, "accumulate_steps": 2}
        found = piped((0, 1), options, 4, True, recompute={"enable": True, "layers": ["blocks.*"]}, then=ran.append)
        return found, ran[0].program

    for text in (RECOMPUTED, "1F1B"):
        for found, program in mw.simulate(lambda text=text: once(text), 2):
            compare(found, alone(2, 2, 4, True))
            tanh = [node for node in program.nodes if str(node.op) in ("aten.tanh.default", "aten.tanh_.default")]
            assert [node.origin.phase for node in tanh] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("mode", "way", "calls"),
    [
        ("1F1B", (0, 1), {"F": 4, "B": 4}),
        ("GPipe", (0, 1), {"F": 4, "B": 4}),
        ("Interleaved 1F1B", (0, 1, 0, 1), {"F": 8, "B": 8}),
        ("ZB-H1", (0, 1), {"F": 4, "B": 4, "W": 4}),  # no rank waits for a B of the first rank: it is all W
    ],
)
def test_an_unsplit_backward_pass_is_one_call(
    mode: str, way: tuple[int, ...], calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every action runs exactly one program, and every result of the program is used outside it."""
    ran: list[tuple[int, str]] = []

    def counted(place: Any, part: Any) -> Any:
        def run(*given: Any) -> Any:
            ran.append((mw.get_rank(), place.part))
            return part.run(*given)

        return replace(part, run=run)

    make = runner_module._part
    monkeypatch.setattr(runner_module, "_part", lambda place, *given: counted(place, make(place, *given)))
    mw.simulate(lambda: piped(way, {"schedule_mode": mode, "accumulate_steps": 4}, 8, True), 2)
    for rank in range(2):
        found = [part for r, part in ran if r == rank]
        wanted = {part: n for part, n in calls.items() if part != "B" or "W" not in calls or rank}
        assert {part: found.count(part) // STEPS for part in dict.fromkeys(found)} == wanted


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        ("1F1B", (0, 1)),
        ("Interleaved 1F1B", (0, 1, 0, 1)),
        ("ZB-V", (0, 1, 1, 0)),
        ("DualPipe", (0, 1)),
    ],
)
def test_dropout_drops_the_same_elements_as_one_device(mode: str, way: tuple[int, ...]) -> None:
    """The order of a row has no influence, and generators end in the state of one device's generator."""

    def net() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()) for _ in way])

    def steps(step: Any) -> list[float]:
        torch.manual_seed(7)
        return [*(float(step(torch.ones(8, 6) * n, torch.zeros(8, 6))) for n in range(1, 3)), torch.rand(1).item()]

    def staged_steps() -> list[float]:
        model = net()
        mesh = mw.ProcessMesh([0, 1], ["pp"])
        mw.split_pipeline(model, mesh, at=[str(n) for n in range(1, len(way))], way=way)
        options = {"enable": True, "schedule_mode": mode, "accumulate_steps": 4}
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        return steps(mw.to_static(model, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(pipeline=options)))

    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), 0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.chunk(4), y.chunk(4), strict=True)
        loss = torch.stack([nn.functional.mse_loss(alone(a), b) for a, b in pairs]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    expected = steps(step)
    for found in mw.simulate(staged_steps, 2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_table_is_a_schedule() -> None:
    text = str(one_f_one_b(2, 4))
    options = {"schedule_mode": text, "accumulate_steps": 4}
    found = mw.simulate(lambda: piped((0, 1), options, 8, then=lambda dist: dist.recordings), 2)
    compare(found[0], alone(2, 4, 8))
    assert [recordings for *_, recordings in found] == [1, 1]  # the states of other stages, too, exist from the start


@pytest.mark.parametrize(
    ("way", "options", "error", "says"),
    [
        ((0, 1), {"schedule_mode": "ZB-V"}, StageError, "chunks on stages"),
        ((0, 1), {"schedule_mode": "Chimera", "accumulate_steps": 2}, StageError, "updates"),
        ((0, 1), {"schedule_mode": "no such"}, ScheduleError, "no such"),
        ((0, 1), {"schedule_mode": "PipeDream", "accumulate_steps": 4}, StageError, "versions of the weights"),
        ((0, 1), {"schedule_mode": "PipeDream-2BW", "accumulate_steps": 4}, StageError, "versions of the weights"),
        ((0, 1), {"schedule_mode": "1F1B", "capacity": 2.0}, StrategyError, "capacity = 2"),
        ((0, 1), {"schedule_mode": str(one_f_one_b(2, 4))}, StrategyError, "accumulate_steps = 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    way: tuple[int, ...], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        mw.simulate(lambda: piped(way, {"accumulate_steps": 1, **options}, 4), max(way) + 1)
