"""Pipeline schedules as tables of actions: the known schedules, a checker, a simulator and a runner.

table        schedules as tables of actions: text form, order of execution, memory, checks
simulation   start and end of every action, pictures, and tables made from times
schedules    the known schedules, by name and with closed forms
partition    a captured program, split into stages, actions and slices of sequences
runtime      execution of a rank's row on its communicator
"""

from ._errors import ScheduleError, StageError
from .partition.buffer_check import check_renewed
from .partition.chunk_times import chunk_times
from .partition.epilogue import behind_all, with_behind
from .partition.microbatch_inputs import Intake, in_pieces, one_by_one
from .partition.mirrored_model import mirrored
from .partition.slice_operators import in_slices
from .partition.stages import Stages, staged
from .partition.step_parts import BEHIND, Parts, taken_apart
from .partition.step_program import end_to_end, taken_up
from .runtime.runner import PipelineRun, check_fits
from .runtime.weight_updates import Make
from .schedules.asynchronous import pipedream, pipedream_2bw
from .schedules.bidirectional import chimera, chimera_doubled, dualpipe, dualpipe_v
from .schedules.flush_schedules import eager_one_f_one_b, gpipe, one_f_one_b
from .schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from .schedules.known_schedules import KNOWN, Known, Shape, known
from .schedules.sliced_sequences import seq_one_f_one_b, terapipe
from .schedules.v_shaped import v_half, v_min, zb_v
from .schedules.zero_bubble import zb_h1, zb_h2
from .schedules.zero_bubble_heuristic import zb_1p, zb_2p, zero_bubble
from .simulation.batched_simulation import Runs
from .simulation.compaction import squeezed
from .simulation.picture import summary, svg, terminal, trace
from .simulation.simulator import Timed, Timeline, Times, simulate
from .table.action import Action, Kind, parse_action
from .table.checker import channels, check
from .table.execution_order import Channel
from .table.parser import parse_schedule
from .table.peak_memory import Memory, peaks
from .table.schedule import Edge, Schedule, both_ways, linear, looped, zigzag
from .table.transfers import whole_backward, with_transfers
from .table.weight_versions import is_stale, updates, weight_versions

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
