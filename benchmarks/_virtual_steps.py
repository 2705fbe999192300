"""Training steps of four ranks, static and eager, on the test device (`tests/device`), in virtual time.

The times are exact: they are the same on every machine, and in every run.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.cost import Cluster, Device, Link
from meshwright.graph import Program
from meshwright.passes.communication.overlap_schedule import OverlapSchedule, _Tasks
from meshwright.tensor.conversion import gradient_buckets
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices, Timing
from tests.device.training import eager_step

RANKS, STEPS = 4, 3
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"}
FREE = 1e30
"""Bytes per second of memory: an operator takes the time of its launch and of its operations."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Prices of the test device: seconds per kernel, operations per second, and the link between ranks."""

    kernel: float = 0.5e-6
    flops: float = 4e11
    latency: float = 5e-6
    bandwidth: float = 2e10

    @property
    def cluster(self) -> Cluster:
        """Return the cluster that has the same prices in the cost model."""
        device = Device("virtual", {torch.float32: self.flops}, FREE, memory=1e12, overhead=self.kernel, reach=1.0)
        return Cluster(device, Link("virtual", self.bandwidth, 0.0, start=self.latency, reach=1.0))

    @property
    def schedule(self) -> OverlapSchedule:
        """Return the pass that overlaps collectives with operators on this machine."""
        return OverlapSchedule(self.cluster)


@dataclass(frozen=True, slots=True)
class Chain:
    """Sizes of a model of linear layers with [width, width] weights, and of the rows of the whole batch.

    `axis` is "dp" if the rows are sharded, or "tp" if weights are: by their rows in even layers, by columns in others.
    """

    layers: int = 12
    width: int = 256
    rows: int = 256
    axis: str = "dp"


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """Virtual time of a step, its work, its program and its losses. An eager step has no program."""

    begin: float
    end: float
    work: tuple[Timing, ...]
    """Operators and collectives of one rank."""
    program: Program | None
    losses: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.end - self.begin

    @property
    def compute(self) -> float:
        """Seconds of all operators."""
        return sum(t.end - t.start for t in self.work if t.name not in COLLECTIVES)

    @property
    def collectives(self) -> tuple[float, ...]:
        """Seconds of each collective."""
        return tuple(t.end - t.start for t in self.work if t.name in COLLECTIVES)

    @property
    def link(self) -> float:
        """Seconds of all collectives."""
        return sum(self.collectives)

    @property
    def exposed(self) -> float:
        """Seconds in which no operator runs."""
        return self.seconds - self.compute

    @property
    def hidden(self) -> float:
        """Seconds in which a collective runs beside an operator."""
        return self.link - self.exposed


@contextmanager
def buckets_of(nbytes: int) -> Generator[None]:
    """Give buckets of eager data parallelism another size inside the block."""
    before = gradient_buckets.BUCKET_BYTES
    gradient_buckets.BUCKET_BYTES = nbytes
    try:
        yield
    finally:
        gradient_buckets.BUCKET_BYTES = before


def lower_bound(step: VirtualStep, machine: Machine) -> float:
    """Return the longest of operators, collectives and critical path of an unscheduled step, in virtual seconds.

    The last reduction of an eager step runs alone, since the optimizer needs all gradients.
    """
    if step.program is None:
        return max(step.link, step.compute + step.collectives[-1])
    return max(step.compute, step.link, _critical_path(_Tasks(step.program, machine.cluster)))


def _critical_path(tasks: _Tasks) -> float:
    """Return the longest path of a program in seconds, on a machine that runs everything at once."""
    ends: list[float] = []
    for seconds, before in zip(tasks.seconds, tasks.before, strict=True):
        ends.append(seconds + max((ends[each] for each in before), default=0.0))
    return max(ends)


def virtual_step(
    devices: Devices, machine: Machine, chain: Chain, strategy: mw.Strategy | None, ranks: int = RANKS
) -> VirtualStep:
    """Return the slowest rank's last step of a few steps, which are eager without a strategy."""
    with devices.priced(machine.kernel, FREE, machine.flops), devices.recording_timeline() as timeline:
        program = run_on_devices(
            lambda device: _train(devices, chain, strategy, device), machine.latency, machine.bandwidth
        )
        trained = mw.simulate(program, ranks)
    steps = [_of_rank(rank, found, timeline) for rank, found in enumerate(trained)]
    return max(steps, key=lambda step: step.seconds)


def process_step(
    devices: Devices, machine: Machine, chain: Chain, strategy: mw.Strategy | None, device: torch.device
) -> VirtualStep:
    """Return the last step of the caller, which is a process whose transport has the prices of the machine."""
    with devices.priced(machine.kernel, FREE, machine.flops), devices.recording_timeline() as timeline:
        found = _train(devices, chain, strategy, device)
    return _of_rank(device.index, found, timeline)


@dataclass(frozen=True, slots=True)
class _Trained:
    """Virtual time at the begin and at the end of the last step of a rank, its program and all losses."""

    begin: float
    end: float
    program: Program | None
    losses: tuple[float, ...]


def _of_rank(rank: int, found: _Trained, timeline: list[Timing]) -> VirtualStep:
    own = tuple(t for t in timeline if t.device == rank and t.start >= found.begin and t.end <= found.end)
    return VirtualStep(found.begin, found.end, own, found.program, found.losses)


def _train(devices: Devices, chain: Chain, strategy: mw.Strategy | None, device: torch.device) -> _Trained:
    mesh = mw.ProcessMesh(range(current_communicator().size), [chain.axis])
    torch.manual_seed(0)
    model: Any = _Chain(chain).to(device)
    mw.shard_layer(model, mesh, _shard_weights if chain.axis == "tp" else _leave_whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    static = None if strategy is None else mw.to_static(model, None, F.mse_loss, optimizer, strategy)
    step = static or eager_step(model, F.mse_loss, optimizer)
    x, y = (_batch(chain, mesh, device, seed) for seed in range(2))
    losses: list[Tensor] = []
    begin = end = 0.0
    for _ in range(STEPS):
        begin = _time(devices)
        losses.append(step(x, y))
        end = _time(devices)
    return _Trained(begin, end, static.program if static else None, tuple(map(float, losses)))


def _leave_whole(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    return None


def _shard_weights(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if not isinstance(layer, nn.Linear):
        return
    place, by_rows = mw.Shard(0), int(name.split(".")[-1]) % 2 == 0
    layer.weight = mw.shard_tensor(layer.weight, mesh, [place if by_rows else mw.Shard(1)])
    if by_rows:
        setattr(layer, "bias", mw.shard_tensor(layer.bias, mesh, [place]))  # noqa: B010 - stubs: an nn.Parameter


class _Chain(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(chain.width, chain.width) for _ in range(chain.layers))

    def forward(self, x_bd: Tensor) -> Tensor:
        for layer in self.layers:
            x_bd = torch.relu(layer(x_bd))
        return x_bd


def _batch(chain: Chain, mesh: mw.ProcessMesh, device: torch.device, seed: int) -> Tensor:
    x = torch.linspace(-1, 2, chain.rows * chain.width, device=device).view(chain.rows, chain.width)
    return mw.shard_tensor(x.add(seed).sin(), mesh, [mw.Shard(0) if chain.axis == "dp" else mw.Replicate()])


def _time(devices: Devices) -> float:
    """Return the virtual time of the host once the device has done all of its work."""
    torch.accelerator.synchronize()
    return devices.core.host_time()
