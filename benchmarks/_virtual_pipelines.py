"""Static steps of pipelines on the test device in virtual time, beside the times that `simulate_schedule` predicts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.comm.streams.communication_streams import CommunicationStreams
from meshwright.pipeline import Schedule, Times, simulate_schedule
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices, Timing

from ._virtual_steps import FREE, STEPS, Machine

STAGES = 4
UPDATE = "after all microbatches"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule, its microbatches, and a model: a square linear layer in each stage, with square microbatches."""

    schedule: str
    microbatches: int = 8
    width: int = 128

    @property
    def message(self) -> int:
        """Return the bytes of a message."""
        return self.width * self.width * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Spans:
    """The actions of a rank in its last step: name, begin and end on its stream of operators, in virtual seconds."""

    actions: list[tuple[str, float, float]] = field(default_factory=list)

    def seconds(self, operators: list[Timing]) -> dict[str, float]:
        """Return the mean seconds of the operators of each kind of action, by names such as "F.2" for F of chunk 2."""
        found: dict[str, list[float]] = {}
        for name, begin, end in self.actions:
            inside = [t.end - t.start for t in operators if begin <= t.start < end]
            found.setdefault(_kind_of(name), []).append(sum(inside))
        return {kind: mean(each) for kind, each in found.items()}


def _kind_of(name: str) -> str:
    if name == UPDATE:
        return name
    action = name.split()[0]  # such as F3.2 for microbatch 3 of chunk 2
    return f"{action[0]}.{action.partition('.')[2]}"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of the first stage, which begins it and ends it: its seconds, and the losses of all steps."""

    seconds: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PipelineStep(TimedStep):
    """The last step in virtual time."""

    schedule: Schedule
    of_actions: Mapping[str, float]
    """Seconds of the operators of each kind of action."""

    def predicted(self, machine: Machine, message: int, overlaps: bool) -> float:
        """Return the seconds of a step that `simulate_schedule` predicts from the times of the actions.

        Without overlap, a message keeps the sender from its next action while it leaves.
        """
        leaving = message / machine.bandwidth
        times = Times(*(self._of_chunks(part) for part in ("F", "RB", "W")), transfer=machine.latency + leaving)
        if not overlaps:
            last = self.schedule.chunks - 1
            times = replace(
                times,
                forward=tuple(t + leaving * (c < last) for c, t in enumerate(self._of_chunks("F"))),
                backward=tuple(t + leaving * (c > 0) for c, t in enumerate(self._of_chunks("RB"))),
                transfer=machine.latency,
            )
        return simulate_schedule(self.schedule, times).makespan + self.of_actions[UPDATE]

    def _of_chunks(self, parts: str) -> tuple[float, ...]:
        """Return the seconds of some parts of a step, for each chunk."""
        names = [[f"{part}.{c}" for part in parts] for c in range(self.schedule.chunks)]
        return tuple(sum(self.of_actions.get(name, 0.0) for name in each) for each in names)


@dataclass(frozen=True, slots=True)
class OverlappedPipeline:
    """A step whose messages leave beside operators, one whose messages leave between them, and the predicted times."""

    without: TimedStep
    overlapped: TimedStep
    bound: float
    predicted: float

    @property
    def share(self) -> float:
        """Return the hidden seconds, divided by those that the simulated schedules hide."""
        return (self.without.seconds - self.overlapped.seconds) / self.predicted

    @property
    def slowdown(self) -> float:
        """Return the time of the overlapped step, divided by that of the simulated schedule."""
        return self.overlapped.seconds / self.bound

    @property
    def details(self) -> dict[str, float]:
        """Return the microseconds behind the two ratios."""
        seconds = {
            "without overlap": self.without.seconds,
            "with overlap": self.overlapped.seconds,
            "simulated schedule": self.bound,
            "hidden": self.without.seconds - self.overlapped.seconds,
            "predicted as hidden": self.predicted,
        }
        return {name: round(each * 1e6, 2) for name, each in seconds.items()}


def overlapped_pipeline(devices: Devices, machine: Machine, pipeline: Pipeline) -> OverlappedPipeline:
    """Return a pipeline's step without and with overlap."""
    with messages_between_operators():
        without = _step(devices, machine, pipeline)
    overlapped = _step(devices, machine, pipeline)
    apart, bound = (overlapped.predicted(machine, pipeline.message, overlaps) for overlaps in (False, True))
    return OverlappedPipeline(without, overlapped, bound, apart - bound)


@contextmanager
def messages_between_operators() -> Generator[None]:
    """Send and receive messages on the stream of the operators inside the block."""
    before = CommunicationStreams.stream

    def stream(self: CommunicationStreams, device: torch.device, name: str = "collectives") -> torch.Stream:
        is_message = name.startswith("messages")
        return torch.accelerator.current_stream(device) if is_message else before(self, device, name)

    CommunicationStreams.stream = stream
    try:
        yield
    finally:
        CommunicationStreams.stream = before


def _step(devices: Devices, machine: Machine, pipeline: Pipeline) -> PipelineStep:
    """Return the last step of a few."""
    with devices.priced(machine.kernel, FREE, machine.flops), devices.recording_timeline() as timeline:
        program = run_on_devices(lambda device: _train(devices, pipeline, device), machine.latency, machine.bandwidth)
        trained = mw.simulate(program, STAGES)
    of_actions: dict[str, float] = {}
    for rank, (_, _, spans, _) in enumerate(trained):
        found = spans.seconds([t for t in timeline if t.device == rank and t.stream == 0 and t.name != "message"])
        of_actions |= {kind: max(each, of_actions.get(kind, 0.0)) for kind, each in found.items()}
    seconds, losses, _, schedule = trained[0]
    return PipelineStep(seconds, losses, schedule, of_actions)


def _train(
    devices: Devices, pipeline: Pipeline, device: torch.device
) -> tuple[float, tuple[float, ...], Spans, Schedule]:
    torch.manual_seed(0)
    width, rows = pipeline.width, pipeline.width * pipeline.microbatches
    mesh = mw.ProcessMesh(range(STAGES), ["pp"])
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(STAGES))
    model = mw.split_pipeline(nn.Sequential(*layers).to(device), mesh, axis="pp", batch=[mw.Replicate()])
    last = mesh["pp", STAGES - 1]

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, mw.reshard(y, last, [mw.Replicate()]))

    options = {"enable": True, "accumulate_steps": pipeline.microbatches, "schedule_mode": pipeline.schedule}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = mw.to_static(model, None, loss_of, optimizer, mw.Strategy.of(pipeline=options))
    x, y = (torch.linspace(-1, 2, rows * width, device=device).view(rows, width).add(k).sin() for k in range(2))
    losses = [step(x, y) for _ in range(STEPS - 1)]
    spans, seen = Spans(), current_communicator().seen
    begin = _time(devices)
    with seen.telling(lambda call, received: None, _watcher(devices, spans)):
        losses.append(step(x, y))
    seconds = _time(devices) - begin
    assert step.pipeline is not None
    return seconds, tuple(map(float, losses)), spans, step.pipeline.schedule


def _watcher(devices: Devices, spans: Spans) -> Callable[[str, str], Callable[[], None] | None]:
    """Return a function that notes the begin and the end of each action."""

    def now() -> float:
        return devices.core.stream_time(torch.accelerator.current_stream())

    def watch(kind: str, name: str) -> Callable[[], None] | None:
        begin = now()
        return (lambda: spans.actions.append((name, begin, now()))) if kind == "pipeline" else None

    return watch


def _time(devices: Devices) -> float:
    """Return the virtual time of the host once the device has done all of its work."""
    torch.accelerator.synchronize()
    return devices.core.host_time()
