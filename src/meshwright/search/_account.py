"""Why a step takes what it takes: an account of a plan, as data that a text or a page is written from.

It may be that of a plan by sizes (`account`), of a module's (`MeshPlan.account`), or of a program (`program_account`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.pipeline import Kind, Timeline

from ._units import signed


@dataclass(frozen=True, slots=True)
class Laid:
    """A tensor and how it lies: the path of its layer, `layout` with the whole shape, bytes of a rank's part.

    `count` tells how many such tensors there are, where layers are alike.
    """

    layer: str
    name: str
    layout: str
    nbytes: float
    note: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Sent:
    """A communication: what meets and where, over which link, how often in a step; bytes of one, seconds of all.

    `exposed` are the seconds that nothing hides, where that is known, `source` the line of the model at which it is.
    """

    kind: str
    what: str
    where: str
    link: str
    count: float
    nbytes: float
    seconds: float
    exposed: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Rival:
    """Another plan: what it has different, what it takes, and by what it loses."""

    how: str
    seconds: float
    nbytes: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes that a rank holds, as (when, bytes) from one change to the next; `unit` says what `when` counts."""

    rank: str
    points: tuple[tuple[float, float], ...]
    unit: str = "s"


@dataclass(frozen=True)
class Account:
    """What is trained, how, and where; what that takes, and of what these are the sums.

    `room` is what a rank may hold; `why` says what limits, in lines; `held` are bytes by kind, rank by rank.
    """

    what: str
    how: str
    where: str
    seconds: float
    nbytes: float
    room: float
    why: tuple[str, ...]
    spent: Mapping[str, float]
    held: Mapping[str, Mapping[str, float]]
    laid: tuple[Laid, ...]
    sent: tuple[Sent, ...]
    rivals: tuple[Rival, ...] = ()
    decided: Mapping[str, object] = field(default_factory=dict[str, object])
    timeline: Timeline | None = field(default=None, repr=False)
    curves: tuple[Curve, ...] = field(default=(), repr=False)

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.room


def rising(name: str, timeline: Timeline, rank: int, base: float, each: Sequence[float]) -> Curve:
    """What a rank of a pipeline holds: `base`, and for each microbatch that is alive so many bytes, chunk by chunk."""
    now, points = base, {0.0: base}
    for timed in timeline.rows[rank]:
        change = sum(ALIVE[atom.kind] * each[atom.chunk] for atom in timed.action.atoms if atom.kind in ALIVE)
        if change:
            now += change
            points[timed.start if change > 0 else timed.end] = now
    return Curve(name, (*points.items(), (timeline.makespan, now)))


ALIVE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
"""How many more microbatches a rank holds: a forward begins one, the last of its gradients ends it."""


def loses(own: Mapping[str, float], other: Mapping[str, float], most: int = 2) -> str:
    """By what another step takes longer, the largest parts first; and by what it is shorter, where it is.

    >>> loses({"computation": 1.0, "bubble": 0.1}, {"computation": 0.9, "bubble": 0.4})
    'bubble +300 ms, computation -100 ms'
    """
    changes = {name: other.get(name, 0.0) - own.get(name, 0.0) for name in {**own, **other}}
    whole = sum(own.values()) or 1.0
    longest = sorted(changes, key=lambda name: -abs(changes[name]))[:most]
    return ", ".join(f"{name} {signed(changes[name])}" for name in longest if abs(changes[name]) > whole * 1e-4)
