"""Communication that runs beside computation on the test device, divided by the seconds that the schedule calls hidden.

Static training steps of four ranks run in virtual time, with data and tensor parallelism and ZeRO-3. Each runs without
overlap, and once more with `OverlapSchedule`. The pass predicts the hidden seconds from the prices of the device.

Eager steps with data parallelism run with each reduction finished at its start, and once more beside the backward pass.
All buckets but the last one should be hidden.

Static steps of pipelines run with messages on the stream of the operators, and once more beside them. The times of both
are predicted by `simulate_schedule`. One more pipeline runs on two processes, with a network that delays its messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import meshwright as mw
from meshwright.graph import Pass
from meshwright.passes import OverlapSchedule, SplitProducts
from tests.device.inspection import Devices

from ._delayed_pipelines import delayed_pipeline
from ._virtual_pipelines import OverlappedPipeline, Pipeline, overlapped_pipeline
from ._virtual_steps import Chain, Machine, VirtualStep, buckets_of, lower_bound, virtual_step
from .races import finished_conversions

HIDDEN_GOAL, TIME_GOAL = 0.9, 1.1
WITHOUT_BUCKETS = {"fuse_grad_size_in_MB": 0}
IN_BUCKETS = {"fuse_grad_size_in_MB": 1}
WITHOUT_OVERLAP = OverlapSchedule(memory=0)
EAGER_BUCKET = 2**19
"""Bytes of a bucket of the eager step: it has more than one."""
STAGE_3 = {"enable": True, "stage": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """The axis of a step's parallelism, the options of its strategy, and its passes before `OverlapSchedule`."""

    axis: str
    options: dict[str, Any]
    passes: tuple[Pass, ...] = ()


CASES = {
    "dp": Case("dp", {"dp_optimization": WITHOUT_BUCKETS}),
    "dp, buckets": Case("dp", {"dp_optimization": IN_BUCKETS}),
    "dp, buckets, early updates": Case("dp", {"dp_optimization": IN_BUCKETS, "release": True}),
    "ZeRO-3": Case("dp", {"sharding": STAGE_3, "dp_optimization": WITHOUT_BUCKETS}),
    "ZeRO-3, buckets": Case("dp", {"sharding": STAGE_3, "dp_optimization": IN_BUCKETS}),
    "tp, split products": Case("tp", {}, (SplitProducts(pieces=2, least=0),)),
}
PIPELINES = {"pp, 1F1B": Pipeline("1F1B"), "pp, ZB-H1": Pipeline("ZB-H1")}


@dataclass(frozen=True, slots=True)
class Overlapped:
    """One step without and with overlap, its lower bound, and the seconds that are predicted as hidden."""

    without: VirtualStep
    overlapped: VirtualStep
    bound: float
    predicted: float

    @property
    def share(self) -> float:
        """Return the hidden seconds, divided by those that the schedule predicts."""
        return self.overlapped.hidden / self.predicted

    @property
    def slowdown(self) -> float:
        """Return the time of the overlapped step, divided by its lower bound."""
        return self.overlapped.seconds / self.bound

    @property
    def details(self) -> dict[str, float]:
        """Return the virtual microseconds behind the two ratios."""
        seconds = {
            "without overlap": self.without.seconds,
            "with overlap": self.overlapped.seconds,
            "lower bound": self.bound,
            "operators": self.overlapped.compute,
            "collectives": self.overlapped.link,
            "hidden": self.overlapped.hidden,
            "predicted as hidden": self.predicted,
        }
        return {name: round(each * 1e6, 2) for name, each in seconds.items()}


def predicted_seconds(step: VirtualStep) -> float:
    """Return the seconds that `OverlapSchedule` says that it hides; in an eager step, those before the last bucket."""
    if step.program is None:
        return sum(step.collectives[:-1])
    (change,) = (change for change in step.program.changes if change.by == "schedule")
    return change.saved["seconds"]


def overlapped(devices: Devices, machine: Machine, chain: Chain, case: Case) -> Overlapped:
    """Return a step without and with overlap."""
    sizes = replace(chain, axis=case.axis)

    def step(*passes: Pass) -> VirtualStep:
        strategy = mw.Strategy.of(**case.options, passes=(*case.passes, *passes))
        return virtual_step(devices, machine, sizes, strategy)

    return _overlapped(machine, step(WITHOUT_OVERLAP), step(machine.schedule))


def eager_overlapped(devices: Devices, machine: Machine, chain: Chain) -> Overlapped:
    """Return an eager step with data parallelism, without and with overlap."""
    with buckets_of(EAGER_BUCKET):
        with finished_conversions():
            without = virtual_step(devices, machine, chain, None)
        return _overlapped(machine, without, virtual_step(devices, machine, chain, None))


def _overlapped(machine: Machine, without: VirtualStep, overlapped: VirtualStep) -> Overlapped:
    return Overlapped(without, overlapped, lower_bound(without, machine), predicted_seconds(overlapped))


def run(quick: bool = False) -> dict[str, Any]:
    devices, machine = Devices(), Machine()
    chain = Chain(layers=6) if quick else Chain()
    found: dict[str, Overlapped | OverlappedPipeline] = {
        name: overlapped(devices, machine, chain, case) for name, case in CASES.items()
    }
    found["eager dp"] = eager_overlapped(devices, machine, chain)
    found |= {name: overlapped_pipeline(devices, machine, pipeline) for name, pipeline in PIPELINES.items()}
    found["pp, GPipe, 2 processes"] = delayed_pipeline("GPipe")
    same = all(each.without.losses == each.overlapped.losses for each in found.values())
    ok = same and all(each.share >= HIDDEN_GOAL and each.slowdown <= TIME_GOAL for each in found.values())
    return {
        "value": {name: round(each.share, 3) for name, each in found.items()},
        "goal": f"at least {HIDDEN_GOAL} of the predicted seconds hidden; step at most {TIME_GOAL} x its lower bound",
        "ok": ok and not devices.take_races(),
        "details": {
            "step / lower bound": {name: round(each.slowdown, 3) for name, each in found.items()},
            "µs": {name: each.details for name, each in found.items()},
            "same losses": same,
        },
    }
