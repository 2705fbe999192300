"""Account of a training step: its time and memory by part, as data for a text or a page.

It describes a plan by sizes (`account`), a plan for a module (`MeshPlan.account`) or a program (`program_account`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from meshwright.pipeline import ActionKind, Timeline

from .units import count, seconds, signed, size


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor and its layout.

    `layer` is the path of the tensor's layer, `layout` is written with the whole shape, and `nbytes` are the bytes of
    one rank's part. `count` is the number of such tensors, if layers are alike.
    """

    layer: str
    name: str
    layout: str
    nbytes: float
    note: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Communication:
    """One kind of communication of a step.

    `kind` is the collective, `what` the tensor, `where` the phase and layer. `count` is the number of calls in a step,
    `nbytes` the bytes of one call, `seconds` the time of all calls. `exposed` are the seconds that nothing hides, if
    known. `source` is the line of the model that causes the communication. `HEAD` names the columns of `cells`.
    """

    HEAD: ClassVar[tuple[str, ...]] = (
        "communication",
        "of what",
        "where",
        "link",
        "count",
        "bytes",
        "seconds",
        "exposed",
    )

    kind: str
    what: str
    where: str
    link: str
    count: float
    nbytes: float
    seconds: float
    exposed: float | None = None
    source: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table, without the source."""
        exposed = "" if self.exposed is None else seconds(self.exposed)
        numbers = count(self.count), size(self.nbytes), seconds(self.seconds), exposed
        return (self.kind, self.what, self.where, self.link, *numbers)


@dataclass(frozen=True, slots=True)
class OtherPlan:
    """Another plan: how it differs, what it takes, and in which parts of the step it is slower."""

    how: str
    seconds: float
    nbytes: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates of a step: tokens per second, share of the peak of all devices, and device-hours for 10^9 tokens.

    >>> str(Throughput(1e6, 0.4, 17.78))
    '1,000,000 tokens/s, 40.0 % of the peak (MFU), 17.8 device-hours for 10^9 tokens'
    """

    tokens: float
    peak_share: float
    device_hours: float

    def __str__(self) -> str:
        hours = f"{self.device_hours:,.0f}" if self.device_hours >= 1000 else f"{self.device_hours:.3g}"
        share = f"{100 * self.peak_share:.1f} % of the peak (MFU)"
        return f"{self.tokens:,.0f} tokens/s, {share}, {hours} device-hours for 10^9 tokens"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cluster, of the program or of the work, and the time of a token after it, relative to now.

    `ranks` is the number of ranks after it, relative to now. Fewer ranks may be a better use of devices, though a token
    takes longer.

    >>> str(Change("twice the batch", 0.9))
    'twice the batch: 10.0 % less time for a token'
    >>> str(Change("64 ranks", 1.2, ranks=0.25))
    '64 ranks: 20.0 % more time for a token, 70.0 % fewer device-hours'
    """

    what: str
    times: float
    ranks: float = 1.0

    def __str__(self) -> str:
        if self.ranks < 1:
            time = f"{100 * abs(self.times - 1):.1f} % {'more' if self.times > 1 else 'less'} time for a token"
            return f"{self.what}: {time}, {100 * (1 - self.times * self.ranks):.1f} % fewer device-hours"
        return f"{self.what}: {100 * (1 - self.times):.1f} % less time for a token"


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes that a rank holds over time: `points` are (when, bytes) at each change, `unit` is the unit of `when`."""

    rank: str
    points: tuple[tuple[float, float], ...]
    unit: str = "s"


@dataclass(frozen=True)
class Account:
    """Account of a step: the model, the plan and the ranks, with the parts of its time and memory.

    `what` names the model, `how` the plan, `where` the ranks. `memory_limit` is the number of bytes that a rank may
    hold. `why` names the bottleneck, in lines. `spent` are the seconds by part. `held` are the bytes by kind, rank by
    rank. `assumed` says what the price takes for granted. `changes` would make a token faster or take fewer devices,
    the best one first. `recipes` are the plans of others for similar models. Modules and programs have no changes and
    recipes.
    """

    what: str
    how: str
    where: str
    seconds: float
    nbytes: float
    memory_limit: float
    why: tuple[str, ...]
    spent: Mapping[str, float]
    held: Mapping[str, Mapping[str, float]]
    laid: tuple[TensorLayout, ...]
    sent: tuple[Communication, ...]
    rivals: tuple[OtherPlan, ...] = ()
    decided: Mapping[str, object] = field(default_factory=dict[str, object])
    timeline: Timeline | None = field(default=None, repr=False)
    curves: tuple[MemoryCurve, ...] = field(default=(), repr=False)
    throughput: Throughput | None = None
    assumed: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    recipes: tuple[OtherPlan, ...] = ()

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.memory_limit

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines that matter most: rates, the fullest rank, and the change that would help most, as far as known."""
        fits = "" if self.fits else "  DOES NOT FIT"
        held = f"{size(self.nbytes)} of {size(self.memory_limit)} on the fullest rank{fits}"
        rates = (str(self.throughput),) if self.throughput else ()
        best = (f"what would help most: {self.changes[0]}",) if self.changes else ()
        return (*rates, f"{seconds(self.seconds)} per step; {held}", *best)

    def held_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the kinds of held bytes, and a row of each rank: its name, the bytes of each kind, and their sum."""
        kinds = list(dict.fromkeys(kind for parts in self.held.values() for kind in parts))
        return kinds, [
            [rank, *(size(parts.get(kind, 0.0)) for kind in kinds), size(sum(parts.values()))]
            for rank, parts in self.held.items()
        ]


def pipeline_memory_curve(name: str, timeline: Timeline, rank: int, base: float, each: Sequence[float]) -> MemoryCurve:
    """Return the memory curve of a pipeline rank: `base`, plus `each` chunk's bytes per microbatch in flight."""
    now, points = base, {0.0: base}
    for timed in timeline.rows[rank]:
        change = sum(ALIVE[atom.kind] * each[atom.chunk] for atom in timed.action.atoms if atom.kind in ALIVE)
        if change:
            now += change
            points[timed.start if change > 0 else timed.end] = now
    return MemoryCurve(name, (*points.items(), (timeline.makespan, now)))


ALIVE = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_WEIGHT: -1}
"""Change of the number of microbatches in flight: a forward begins one, the last of its gradients ends it."""


def slower_parts(own: Mapping[str, float], other: Mapping[str, float], most: int = 2) -> str:
    """Return the parts of a step in which `other` takes longer or shorter than `own`, the largest differences first.

    >>> slower_parts({"computation": 1.0, "bubble": 0.1}, {"computation": 0.9, "bubble": 0.4})
    'bubble +300 ms, computation -100 ms'
    """
    changes = {name: other.get(name, 0.0) - own.get(name, 0.0) for name in {**own, **other}}
    whole = sum(own.values()) or 1.0
    longest = sorted(changes, key=lambda name: -abs(changes[name]))[:most]
    return ", ".join(f"{name} {signed(changes[name])}" for name in longest if abs(changes[name]) > whole * 1e-4)
