"""The known schedules by name, with their closed forms.

Times are F, B and W of a whole rank and one microbatch, without time for messages; a chunk takes 1/v of them. A form
that holds only for F = B = W is written with F.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from .._errors import ScheduleError
from ..schedules.asynchronous import pipedream, pipedream_2bw
from ..table.schedule import Schedule
from .bidirectional import chimera, chimera_doubled, dualpipe, dualpipe_v
from .flush_schedules import eager_one_f_one_b, gpipe, one_f_one_b
from .interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from .v_shaped import v_half, v_min, wave, zb_v
from .zero_bubble import zb_h1, zb_h2
from .zero_bubble_heuristic import zb_1p, zb_2p


class ScheduleSizes(NamedTuple):
    """Arguments of the closed forms.

    p ranks, m microbatches, v chunks per rank, and a microbatch's times on a rank.
    """

    p: int
    m: int
    v: int = 1
    f: float = 1.0
    b: float = 1.0
    w: float = 1.0

    @property
    def work(self) -> float:
        """Compute time of each rank."""
        return self.m * (self.f + self.b + self.w)


ClosedForm = Callable[[ScheduleSizes], float]


@dataclass(frozen=True)
class KnownSchedule:
    """One schedule: its function, the condition `holds` under which its closed forms are true, and these forms.

    `bubble` is the makespan minus the work of a rank, `span_bubble` the span minus that work. `peak` is the largest
    number of microbatches held by any rank. `times` names the times for which the forms hold: "any", "F=B=W", "B+W=2F".
    """

    name: str
    make: Callable[..., Schedule]
    source: str
    bubble: ClosedForm | None = None
    span_bubble: ClosedForm | None = None
    peak: ClosedForm | None = None
    holds: Callable[[ScheduleSizes], bool] = lambda s: s.m >= s.p
    times: str = "any"
    takes_chunks: bool = False
    """True if the third argument of the function is the number of chunks per rank."""

    def build(self, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """Return the schedule of these sizes; a schedule with a fixed number of chunks per rank ignores `chunks`."""
        return self.make(ranks, microbatches, *([chunks] if self.takes_chunks else []))


def _flush_bubble(s: ScheduleSizes) -> float:
    return (s.p - 1) * (s.f + s.b + s.w) / s.v


def _late_weight_bubble(s: ScheduleSizes) -> float:
    return (s.p - 1) * (s.f + s.b - s.w) / s.v


def _no_bubble(_: ScheduleSizes) -> float:
    return 0.0


def _always(_: ScheduleSizes) -> bool:
    return True


def _whole_groups(s: ScheduleSizes) -> bool:
    return s.m % s.p == 0


def _warm(s: ScheduleSizes) -> bool:
    return s.m >= 2 * s.p - 1


def _both_ends(s: ScheduleSizes) -> bool:
    return s.p % 2 == 0 and s.m % 2 == 0 and s.m >= 2 * s.p


KNOWN_SCHEDULES: Mapping[str, KnownSchedule] = {
    k.name: k
    for k in (
        KnownSchedule("GPipe", gpipe, "arXiv 1811.06965", _flush_bubble, _flush_bubble, lambda s: s.m, _always),
        KnownSchedule(
            "1F1B",
            one_f_one_b,
            "arXiv 2006.09503",
            _flush_bubble,
            _flush_bubble,
            lambda s: min(s.m, s.p),
            _always,
        ),
        KnownSchedule(
            "Eager 1F1B",
            eager_one_f_one_b,
            "arXiv 2211.05322",
            _flush_bubble,
            _flush_bubble,
            lambda s: min(s.m, 2 * s.p - 1),
            _always,
        ),
        KnownSchedule(
            "Interleaved 1F1B",
            interleaved_one_f_one_b,
            "arXiv 2104.04473",
            _flush_bubble,
            _flush_bubble,
            lambda s: min(2 * (s.p - 1) + (s.v - 1) * s.p + 1, s.m * s.v) / s.v,
            _whole_groups,
            takes_chunks=True,
        ),
        KnownSchedule(
            "Looped BFS",
            looped_bfs,
            "arXiv 2211.05953",
            _flush_bubble,
            _flush_bubble,
            lambda s: s.m,
            takes_chunks=True,
        ),
        KnownSchedule(
            "ZB-H1",
            zb_h1,
            "arXiv 2401.10241",
            _late_weight_bubble,
            _late_weight_bubble,
            lambda s: s.p,
            times="F=B=W",
        ),
        KnownSchedule(
            "ZB-H2",
            zb_h2,
            "arXiv 2401.10241",
            _late_weight_bubble,
            _no_bubble,
            lambda s: 2 * s.p - 1,
            _warm,
            times="F=B=W",
        ),
        KnownSchedule(
            "ZB-1p",
            zb_1p,
            "arXiv 2401.10241",
            _late_weight_bubble,
            _late_weight_bubble,
            lambda s: s.p,
            times="F=B=W",
        ),
        KnownSchedule("ZB-2p", zb_2p, "arXiv 2401.10241", _late_weight_bubble, _no_bubble, None, _warm, times="F=B=W"),
        KnownSchedule(
            "Interleaved zero bubble",
            interleaved_zero_bubble,
            "arXiv 2401.10241",
            _late_weight_bubble,
            None,
            lambda s: s.p,
            _whole_groups,
            times="F=B=W",
            takes_chunks=True,
        ),
        KnownSchedule(
            "ZB-V",
            zb_v,
            "arXiv 2401.10241",
            lambda s: (s.p - 1) * s.f / 2,
            _no_bubble,
            lambda s: s.p,
            lambda s: s.m >= 2 * s.p,
            times="F=B=W",
        ),
        KnownSchedule("V-Half", v_half, "arXiv 2405.15362", peak=lambda s: s.p // 2 + 1, times="F=B=W"),
        KnownSchedule("V-Min", v_min, "arXiv 2405.15362", peak=lambda s: (s.p + 4) // 3, times="F=B=W"),
        KnownSchedule("Wave", wave, "arXiv 2308.15762", times="F=B=W", takes_chunks=True),
        KnownSchedule(
            "DualPipe",
            dualpipe,
            "arXiv 2412.19437",
            lambda s: (s.p // 2 - 1) * 2 * s.f,
            None,
            lambda s: s.p + 1,
            _both_ends,
            times="F=B=W",
        ),
        KnownSchedule(
            "DualPipe-V",
            dualpipe_v,
            "sail-sg, DualPipe cut in half",
            lambda s: (s.p - 1) * s.f,
            None,
            lambda s: s.p + 0.5,
            lambda s: s.m >= 2 * s.p,
            times="F=B=W",
        ),
        KnownSchedule(
            "Chimera",
            chimera,
            "arXiv 2107.06925",
            lambda s: 2 * (s.p - 2) * s.f,
            None,
            lambda s: s.p,
            lambda s: s.p % 2 == 0 and s.m == s.p,
            times="B+W=2F",
        ),
        KnownSchedule(
            "Chimera, forward doubling",
            chimera_doubled,
            "arXiv 2107.06925",
            lambda s: 2 * (s.p - 2) * s.f,
            None,
            lambda s: 2 * s.p,
            lambda s: s.p % 2 == 0 and s.m % (2 * s.p) == 0,
            times="B+W=2F",
        ),
        KnownSchedule(
            "PipeDream",
            pipedream,
            "arXiv 1806.03377",
            _flush_bubble,
            None,
            lambda s: min(s.m, s.p),
            _always,
        ),
        KnownSchedule(
            "PipeDream-2BW",
            pipedream_2bw,
            "arXiv 2006.09503",
            _flush_bubble,
            None,
            lambda s: min(s.m, s.p),
            _whole_groups,
        ),
    )
}


_OF_SLICES = ("Seq1F1B", "TeraPipe")


def schedule_by_name(name: str) -> KnownSchedule:
    """Return the schedule with this name. Raises ScheduleError for an unknown name."""
    if name in _OF_SLICES:
        raise ScheduleError(
            f"schedule {name!r}",
            "a schedule over slices of sequences",
            "sequences in a pipeline stay whole",
            "write ZB-H1 for a small bubble, and shard long sequences over ranks: docs/concepts/context.md",
        )
    if name not in KNOWN_SCHEDULES:
        plain = {one.casefold(): one for one in KNOWN_SCHEDULES}
        near = get_close_matches(name.casefold(), plain, n=1, cutoff=0.0)[0]
        raise ScheduleError(
            f"schedule {name!r}",
            "no such schedule",
            f"the known schedules are {', '.join(KNOWN_SCHEDULES)}",
            f"write {plain[near]}",
        )
    return KNOWN_SCHEDULES[name]
