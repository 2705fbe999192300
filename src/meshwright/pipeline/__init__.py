"""Pipeline schedules as tables of actions: the known schedules, a checker, a simulator and a runner.

table        schedules as tables of actions: text form, order of execution, memory, checks
simulation   start and end of every action, pictures, and tables made from times
schedules    the known schedules, by name and with closed forms
partition    a captured program, split into stages and actions
runtime      execution of a rank's row on its communicator
"""

from typing import TYPE_CHECKING

from meshwright.layout import lazy_names

if TYPE_CHECKING:
    from ._errors import ScheduleError, StageError
    from .partition.buffer_check import check_renewed
    from .partition.chunk_times import chunk_times
    from .partition.epilogue import joint_epilogue, with_epilogue
    from .partition.microbatch_inputs import MicrobatchInputs, separate_batches, split_batch
    from .partition.mirrored_model import mirrored
    from .partition.stages import Stages, split_stages
    from .partition.step_parts import EPILOGUE, RankParts, split_step
    from .partition.step_program import read_step_program, write_step_program
    from .runtime.runner import PipelineRun, check_fits
    from .runtime.weight_updates import ProgramMaker
    from .schedules.asynchronous import pipedream, pipedream_2bw
    from .schedules.bidirectional import chimera, chimera_doubled, dualpipe, dualpipe_v
    from .schedules.flush_schedules import eager_one_f_one_b, gpipe, one_f_one_b
    from .schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
    from .schedules.known_schedules import KNOWN_SCHEDULES, KnownSchedule, ScheduleSizes, schedule_by_name
    from .schedules.v_shaped import v_half, v_min, wave, zb_v
    from .schedules.zero_bubble import zb_h1, zb_h2
    from .schedules.zero_bubble_heuristic import zb_1p, zb_2p, zero_bubble
    from .simulation.batched_simulation import BatchedSimulation
    from .simulation.compaction import compacted
    from .simulation.picture import perfetto_trace, timeline_summary, timeline_svg, timeline_text
    from .simulation.simulator import TimedAction, Timeline, Times, simulate_schedule
    from .table.action import Action, ActionKind, parse_action
    from .table.checker import channels, check_schedule
    from .table.execution_order import Channel
    from .table.parser import parse_schedule
    from .table.peak_memory import ChunkMemory, peaks
    from .table.schedule import Edge, Schedule, both_ways, linear, looped, zigzag
    from .table.transfers import whole_backward, with_transfers
    from .table.weight_versions import is_asynchronous, updates, weight_versions

__all__ = [
    "EPILOGUE",
    "KNOWN_SCHEDULES",
    "Action",
    "ActionKind",
    "BatchedSimulation",
    "Channel",
    "ChunkMemory",
    "Edge",
    "KnownSchedule",
    "MicrobatchInputs",
    "PipelineRun",
    "ProgramMaker",
    "RankParts",
    "Schedule",
    "ScheduleError",
    "ScheduleSizes",
    "StageError",
    "Stages",
    "TimedAction",
    "Timeline",
    "Times",
    "both_ways",
    "channels",
    "check_fits",
    "check_renewed",
    "check_schedule",
    "chimera",
    "chimera_doubled",
    "chunk_times",
    "compacted",
    "dualpipe",
    "dualpipe_v",
    "eager_one_f_one_b",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "is_asynchronous",
    "joint_epilogue",
    "linear",
    "looped",
    "looped_bfs",
    "mirrored",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "peaks",
    "perfetto_trace",
    "pipedream",
    "pipedream_2bw",
    "read_step_program",
    "schedule_by_name",
    "separate_batches",
    "simulate_schedule",
    "split_batch",
    "split_stages",
    "split_step",
    "timeline_summary",
    "timeline_svg",
    "timeline_text",
    "updates",
    "v_half",
    "v_min",
    "wave",
    "weight_versions",
    "whole_backward",
    "with_epilogue",
    "with_transfers",
    "write_step_program",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero_bubble",
    "zigzag",
]

__getattr__ = lazy_names(__name__)
