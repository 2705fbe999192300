"""Pipeline schedules as tables of actions: the known schedules, a checker, a simulator and a runner."""

from ._action import Action, Kind, parse_action
from ._behind import Make
from ._check import channels, check
from ._chunk_times import chunk_times
from ._end_to_end import end_to_end, taken_up
from ._errors import ScheduleError, StageError
from ._flush import eager_one_f_one_b, gpipe, one_f_one_b
from ._intake import Intake, in_pieces, one_by_one
from ._interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from ._known import KNOWN, Known, Shape, known
from ._memory import Memory, peaks
from ._mirror import mirrored
from ._parse import parse_schedule
from ._parts import BEHIND, Parts, taken_apart
from ._picture import summary, svg, terminal, trace
from ._renewed import check_renewed
from ._runner import PipelineRun, check_fits
from ._runs import Runs
from ._schedule import Edge, Schedule, both_ways, linear, looped, zigzag
from ._simulate import Timed, Timeline, Times, simulate
from ._slice_specials import in_slices
from ._slices import seq_one_f_one_b, terapipe
from ._squeeze import squeezed
from ._stages import Stages, staged
from ._stale import is_stale, pipedream, pipedream_2bw, updates, weight_versions
from ._sums import behind_all, with_behind
from ._transfers import whole_backward, with_transfers
from ._two_ways import chimera, chimera_doubled, dualpipe, dualpipe_v
from ._v_shapes import v_half, v_min, zb_v
from ._walk import Channel
from ._zb_heuristic import zb_1p, zb_2p, zero_bubble
from ._zero_bubble import zb_h1, zb_h2

__all__ = [
    "BEHIND",
    "KNOWN",
    "Action",
    "Channel",
    "Edge",
    "Intake",
    "Kind",
    "Known",
    "Make",
    "Memory",
    "Parts",
    "PipelineRun",
    "Runs",
    "Schedule",
    "ScheduleError",
    "Shape",
    "StageError",
    "Stages",
    "Timed",
    "Timeline",
    "Times",
    "behind_all",
    "both_ways",
    "channels",
    "check",
    "check_fits",
    "check_renewed",
    "chimera",
    "chimera_doubled",
    "chunk_times",
    "dualpipe",
    "dualpipe_v",
    "eager_one_f_one_b",
    "end_to_end",
    "gpipe",
    "in_pieces",
    "in_slices",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "is_stale",
    "known",
    "linear",
    "looped",
    "looped_bfs",
    "mirrored",
    "one_by_one",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "peaks",
    "pipedream",
    "pipedream_2bw",
    "seq_one_f_one_b",
    "simulate",
    "squeezed",
    "staged",
    "summary",
    "svg",
    "taken_apart",
    "taken_up",
    "terapipe",
    "terminal",
    "trace",
    "updates",
    "v_half",
    "v_min",
    "weight_versions",
    "whole_backward",
    "with_behind",
    "with_transfers",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero_bubble",
    "zigzag",
]
