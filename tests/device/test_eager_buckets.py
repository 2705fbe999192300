"""Buckets of eager data parallelism start during the last backward pass: bits, calls, waits and virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from benchmarks._left_out_waits import RANKS, left_out_waits
from meshwright.comm import call_purpose, current_communicator
from meshwright.tensor.conversion import gradient_buckets
from tests.compared_ranks import compared
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.waits import recording_waits

WIDTH, LAYERS = 15, 6
BUCKET = 2 * 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of the gradients of two layers: a step has three buckets."""


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", BUCKET)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.used = list(range(LAYERS))
        """Numbers of the layers in the order of their use."""

    def forward(self, x: Tensor) -> Tensor:
        for at in self.used:
            x = torch.tanh(self.layers[at](x))
        return x


@dataclass
class Run:
    """A model on this rank, and the numbers of its calls in each step."""

    device: torch.device | str
    mesh: mw.ProcessMesh = field(default_factory=lambda: mw.ProcessMesh(range(RANKS), ["dp"]))
    early: list[int] = field(default_factory=list[int])
    """Calls during the backward passes of each step, before the program reads a gradient."""
    total: list[int] = field(default_factory=list[int])
    order: list[str] = field(default_factory=list[str])
    """Texts of all calls of backward passes and optimizers, with the numbers of their values (`call_purpose`)."""

    def __post_init__(self) -> None:
        self.net = Net().to(self.device)
        mw.shard_layer(self.net, self.mesh, lambda name, layer, mesh: None)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def loss(self, seed: int = 0) -> Tensor:
        whole = torch.linspace(-1, 2, 8 * WIDTH).view(8, WIDTH).add(seed).sin().to(self.device)
        x = mw.shard_tensor(whole, self.mesh, [mw.Shard(0), *[mw.Replicate()] * (len(self.mesh.shape) - 1)])
        return F.mse_loss(self.net(x), x * 0.5)

    def step(self, passes: int = 1, clip: bool = False, zero: bool = True) -> None:
        losses = [self.loss(k) for k in range(passes)]
        calls: list[str] = []
        with current_communicator().seen.telling(lambda call, _: calls.append(f"{call} for {call_purpose.what[0]}")):
            for loss in losses:
                loss.backward()
            self.early.append(len(calls))
            if clip:
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.01)
            self.optimizer.step()
            self.total.append(len(calls))
        self.order += calls
        self.optimizer.zero_grad(set_to_none=zero)

    def parameters(self) -> list[Tensor]:
        return [mw.unshard_dtensor(p.detach()).cpu() for p in self.net.parameters()]


Program = Callable[[Run], None]


@dataclass
class Outcome:
    """The results of a program on one rank."""

    parameters: list[Tensor]
    early: list[int]
    total: list[int]
    order: list[str]


def _on_ranks(program: Program, on_devices: bool) -> list[Outcome]:
    def run(device: torch.device | str) -> Outcome:
        made = Run(device)
        program(made)
        return Outcome(made.parameters(), made.early, made.total, made.order)

    return mw.simulate(run_on_devices(run) if on_devices else lambda: run("cpu"), RANKS)


def _plain(run: Run) -> None:
    for _ in range(3):
        run.step()


def _accumulated(run: Run) -> None:
    for _ in range(3):
        run.step(passes=3)


def _fewer_passes(run: Run) -> None:
    for passes in (3, 2, 2):
        run.step(passes)


def _clipped(run: Run) -> None:
    for _ in range(3):
        run.step(clip=True)


def _zeroed_in_place(run: Run) -> None:
    for _ in range(3):
        run.step(zero=False)


def _used_twice(run: Run) -> None:
    run.net.used = [0, 1, 2, 3, 4, 5, 0]
    for _ in range(3):
        run.step()


def _unused(run: Run) -> None:
    for used in ([0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5], [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
        run.net.used = used
        run.step()


def _frozen(run: Run) -> None:
    """Parameters that need no gradient for some steps."""
    for needs_gradient in (True, False, True):
        run.net.layers[2].requires_grad_(needs_gradient)
        run.step()


def _dropped_gradients(run: Run) -> None:
    """The program drops the gradients of a pass that has filled two buckets and the half of one."""
    run.net.used = [1, 2, 3, 4, 5]
    run.step()
    run.loss(7).backward()
    for p in run.net.parameters():
        p.grad = None
    run.step()
    run.step()


def _never_read(run: Run) -> None:
    """The program ends while reductions are in flight."""
    run.step()
    run.loss().backward()


def _read_between_passes(run: Run) -> None:
    """A gradient that the program reads between passes is complete, and the next pass adds to it."""
    for _ in range(3):
        run.loss(5).backward()
        first: Any = run.net.layers[0].weight.grad
        assert bool((first != 0).any())
        run.step()


@dataclass(frozen=True)
class Case:
    """A program; the calls during the backward passes of its steps on a device, and all calls of its steps there."""

    program: Program
    early: list[int]
    total: list[int]


CASES = {
    "one pass": Case(_plain, [0, 3, 3], [3, 3, 3]),
    "accumulated passes": Case(_accumulated, [0, 3, 3], [3, 3, 3]),
    "fewer passes than before": Case(_fewer_passes, [0, 0, 3], [3, 3, 3]),
    "clipped": Case(_clipped, [0, 3, 3], [3, 3, 3]),
    "zeroed in place": Case(_zeroed_in_place, [0, 3, 3], [3, 3, 3]),
    "parameter used twice": Case(_used_twice, [0, 3, 3], [3, 3, 3]),
    "unused parameters": Case(_unused, [0, 2, 2, 3], [3, 3, 3, 3]),
    "frozen parameters": Case(_frozen, [0, 2, 3], [3, 3, 3]),
    "dropped gradients": Case(_dropped_gradients, [0, 2, 2], [3, 3, 3]),
    "never read": Case(_never_read, [0], [3]),
    "read between passes": Case(_read_between_passes, [3, 3, 3], [3, 3, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_and_calls(mesh_device: Devices, name: str) -> None:
    case = CASES[name]
    ours, expected = _on_ranks(case.program, True), _on_ranks(case.program, False)
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(map(torch.equal, mine.parameters, theirs.parameters))
        assert (mine.early, mine.total) == (case.early, case.total)
        assert mine.order == ours[0].order
        assert mine.total == theirs.total
        assert not any(theirs.early) or name in ("zeroed in place", "read between passes")


def test_more_passes_than_before_are_a_second_sum(mesh_device: Devices) -> None:
    def program(run: Run) -> None:
        for passes in (1, 1, 4, 4):
            run.step(passes)

    ours, expected = _on_ranks(program, True), _on_ranks(program, False)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.parameters, theirs.parameters)
        assert (mine.early, mine.total) == ([0, 3, 3, 3], [3, 3, 6, 3])
        assert mine.order == ours[0].order


def test_calls_have_equal_numbers_on_all_ranks(mesh_device: Devices) -> None:
    """Processes compare the numbers of the values that a call is for."""

    def program(run: Run) -> None:
        for passes in (1, 2, 2, 3):
            run.step(passes)

    with compared():
        ours = _on_ranks(program, True)
    assert len(set(ours[0].order)) > 9
    for mine in ours:
        assert mine.order == ours[0].order


def test_a_trace_names_the_purpose_of_each_bucket(mesh_device: Devices) -> None:
    def run(device: torch.device) -> list[tuple[str, tuple[str, ...]]]:
        made = Run(device)
        made.step()
        loss = made.loss()
        with mw.trace_comm() as trace:
            loss.backward()
        return [(call.stage, call.axes) for call in trace.calls]

    assert mw.simulate(run_on_devices(run), RANKS) == [[("gradients", ("dp",))] * 3] * RANKS


def test_a_hook_that_reads_gradients_gets_sums(mesh_device: Devices) -> None:
    """A hook of a later layer's parameter reads the gradient of an earlier one in the middle of the pass."""

    def program(run: Run) -> list[Tensor]:
        seen: list[Tensor] = []
        last: Any = run.net.layers[LAYERS - 1].weight
        middle: Any = run.net.layers[2].weight
        middle.register_hook(lambda grad: seen.append(mw.unshard_dtensor(last.grad).cpu()))
        for _ in range(3):
            run.step()
        return seen + run.parameters()

    _compare(program)


def test_hooks_that_need_gradients_get_them_at_once(mesh_device: Devices) -> None:
    def program(run: Run) -> list[Tensor]:
        seen: list[Tensor] = []

        def keep(p: Tensor) -> None:
            assert p.grad is not None
            seen.append(mw.unshard_dtensor(p.grad).cpu())

        for at in (1, 4):
            layer: Any = run.net.layers[at]
            layer.weight.register_post_accumulate_grad_hook(keep)
        for _ in range(3):
            run.step()
        return seen + run.parameters()

    _compare(program)


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 1, 2]], [[1], [2]]], ids=str)
def test_ranks_with_other_parts_make_their_calls_in_the_same_order(
    mesh_device: Devices, monkeypatch: pytest.MonkeyPatch, ranks: list[list[int]]
) -> None:
    """A bucket starts at the same point if the part of a rank is larger, and also if a rank is outside the mesh."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 4 * 8 * (WIDTH + 1))
    orders: dict[int, list[tuple[str, int]]] = {}

    def program(run: Run) -> list[Tensor]:
        for layer in list(run.net.layers)[::2]:
            for name in ("weight", "bias"):
                setattr(layer, name, mw.shard_tensor(getattr(layer, name), run.mesh, [mw.Replicate(), mw.Shard(0)]))
        run.optimizer = torch.optim.SGD(run.net.parameters(), lr=0.1)
        with current_communicator().seen.record_calls() as calls:
            for _ in range(3):
                run.step()
        here = current_communicator().rank
        orders[here] = [(call.kind, call.group[-1] - call.group[0]) for call in calls]
        return run.parameters()

    _compare(program, mw.ProcessMesh(ranks, ["dp", "tp"]))
    members = [rank for row in ranks for rank in row]
    assert all(orders[rank] == orders[members[0]] for rank in members)


def _compare(program: Callable[[Run], list[Tensor]], mesh: mw.ProcessMesh | None = None) -> None:
    """Compare the bits of a program on devices with those on the CPU."""

    def run(device: torch.device | str) -> list[Tensor]:
        return program(Run(device) if mesh is None else Run(device, mesh))

    expected = mw.simulate(lambda: run("cpu"), RANKS)
    for ours, theirs in zip(mw.simulate(run_on_devices(run), RANKS), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_each_dtype_has_a_bucket(mesh_device: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 2**20)

    def program(run: Run) -> None:
        for at in (1, 3):
            layer: Any = run.net.layers[at]
            layer.to(torch.float64)
        run.net.used = [0, 2, 4, 5]
        whole = torch.linspace(-1, 2, 8 * WIDTH).view(8, WIDTH).to(run.device)
        x = mw.shard_tensor(whole, run.mesh, [mw.Shard(0)])
        for _ in range(2):
            wide = F.mse_loss(run.net.layers[3](run.net.layers[1](x.double())), x.double())
            (run.loss() + wide.float()).backward()
            with current_communicator().seen.record_calls() as calls:
                run.optimizer.step()
            run.total.append(len(calls))
            run.optimizer.zero_grad()

    for found in _on_ranks(program, True):
        assert found.total == [2, 2]


def test_at_most_two_reductions_hold_their_terms(mesh_device: Devices) -> None:
    """The third start waits for the oldest reduction."""

    def program(run: Run) -> None:
        run.step()
        loss = run.loss()
        with recording_waits() as names:
            loss.backward()
        waits.append(names)

    waits: list[list[str]] = []
    _on_ranks(program, True)
    names = max(waits, key=len)
    assert names.count("operands of a started all_reduce") == 3
    assert names.count("results of a started all_reduce") == 1


def test_a_step_without_one_of_its_waits_has_a_race(mesh_device: Devices) -> None:
    waits = left_out_waits(mesh_device, Run)
    assert [wait.where for wait in waits].count("operands of a started all_reduce") == 3
    assert all(wait.found or wait.covered for wait in waits)


def test_reductions_run_beside_the_pass(mesh_device: Devices) -> None:
    """In virtual time, all buckets but the last one are hidden."""
    seconds = 1.0

    def run(device: torch.device) -> tuple[float, float]:
        made = Run(device)
        made.step()
        made.step()
        loss = made.loss()
        torch.accelerator.synchronize()
        begin = mesh_device.core.host_time()
        loss.backward()
        made.optimizer.step()
        torch.accelerator.synchronize()
        return begin, mesh_device.core.host_time()

    with mesh_device.priced(seconds, 1e30, 1e30), mesh_device.recording_timeline() as timeline:
        times = mw.simulate(run_on_devices(run, latency=6 * seconds, bandwidth=1e30), RANKS)
    for rank, (begin, end) in enumerate(times):
        own = [t for t in timeline if t.device == rank and t.start >= begin and t.end <= end]
        link = [t for t in own if t.name == "all_reduce"]
        compute = sum(t.end - t.start for t in own if t.name != "all_reduce")
        assert len(link) == 3
        hidden = sum(t.end - t.start for t in link) - (end - begin - compute)
        assert hidden >= 0.9 * 2 * 6 * seconds, (hidden, end - begin, compute)
