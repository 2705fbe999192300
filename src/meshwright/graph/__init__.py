"""Programs: capture, layout completion, recording for each rank, verification, rewrites and execution.

In reading order:

    program      programs as immutable data: values, nodes, inputs; and the editable form, `Draft`
    analysis     properties of a program: live memory, work, strides, constants, validity
    completion   layouts and meshes of all values of a captured program, derived from the user's marks
    recording    operators called on fake tensors become nodes without writes
    guards       comparisons of everything that Python code read while a program was recorded
    files        program files, and texts by which processes and ranks compare programs
    captures     capture of a model's forward pass on fake unsharded tensors
    replay       replay of a captured program for one rank, with gradients and explicit communication
    update       the optimizer's step as a program
    rewriting    rewrite rules, their patterns and checks, the driver that applies them, and passes
    execution    execution of a program node by node, or in kernels compiled by Inductor
"""

from ._errors import CaptureError, ProgramError, ProgramFileError, RewriteError, SideEffectError
from .analysis.linear_tail import linear_tail
from .analysis.live_memory import LiveMemory, Memories, live_memory, looked_at, memories, refuse_writing, written_inputs
from .analysis.node_work import Work, work_of
from .analysis.strides import strides_of
from .analysis.verify import verify
from .captures.capture import Capture, Slot, capture, captured_for, slots_of
from .captures.external_writes import check_stages, writes_outside
from .captures.interception import Hook, UserFunction
from .completion.batch_copies import spread
from .completion.layout_completion import complete, with_layouts
from .completion.stage_sends import Sent, brought, meshes_of
from .execution.fx_runner import Run, runner, to_fx
from .execution.inductor import Kernels, compiled
from .execution.kernel_files import machine, save_kernels, with_kernels
from .execution.two_part_step import InTwo, LookAt, Looking, in_two
from .files.admitted_operators import is_admitted, libraries_of
from .files.alike_ranks import are_alike, first_alike, specs_data, specs_in, specs_of
from .files.canonical_text import meaning_of, meaning_or_none
from .files.encode import program_data
from .files.program_file import load_program, no_program, save_program, told, write_whole
from .guards import (
    OWN,
    Executed,
    Guards,
    class_text,
    described,
    executed_code,
    is_plain,
    observed,
)
from .program.backward_reads import ReadBack
from .program.draft import Draft, Spot
from .program.effects import asserts, crosses, draws, is_drawing, is_pure, is_view, writes_to
from .program.layouts import Layouts, parse_layouts
from .program.node import (
    ALWAYS,
    EVERYWHERE,
    Carry,
    Edge,
    Node,
    Op,
    Origin,
    Over,
    Start,
    Value,
    Wait,
    map_values,
    name_of,
    tensor_dtype,
    values_in,
)
from .program.node_text import node_text, numbered, type_text
from .program.program import Change, Input, Program, communication, communication_text, count_ops
from .program.shape_inference import Names
from .recording.dynamic_sizes import Fits, Holds, holds_of
from .recording.functionalization import overwriting
from .recording.recording import is_lifted
from .replay.joined_programs import joined
from .replay.loss_scale import HELD, LOSS_SCALE, Scaling
from .replay.model_piece import Piece, record_piece
from .replay.recorder import record_forward, record_gradients
from .rewriting.pattern_match import Match
from .rewriting.program_pass import (
    OwnRules,
    Pass,
    RulePass,
    apply_passes,
    register_pass,
    register_rewrite,
    registered_passes,
    registered_rewrites,
)
from .rewriting.rewrite_driver import Edit, rewrite
from .rewriting.rewrite_rule import AnyRewrite, Rewrite, Rewriter
from .rewriting.rule_check import check_rule, check_steps
from .rewriting.rule_trace import carry
from .rewriting.termination_measure import Measure, measure_of
from .torch_hooks import Operator, backend_flags, dispatch_modes, modes_on, note_step, saving_is_hooked
from .update import StateKey, lies_as, made_states, new_state, record_update, runs_users_code

__all__ = [
    "ALWAYS",
    "EVERYWHERE",
    "HELD",
    "LOSS_SCALE",
    "OWN",
    "AnyRewrite",
    "Capture",
    "CaptureError",
    "Carry",
    "Change",
    "Draft",
    "Edge",
    "Edit",
    "Executed",
    "Fits",
    "Guards",
    "Holds",
    "Hook",
    "InTwo",
    "Input",
    "Kernels",
    "Layouts",
    "LiveMemory",
    "LookAt",
    "Looking",
    "Match",
    "Measure",
    "Memories",
    "Names",
    "Node",
    "Op",
    "Operator",
    "Origin",
    "Over",
    "OwnRules",
    "Pass",
    "Piece",
    "Program",
    "ProgramError",
    "ProgramFileError",
    "ReadBack",
    "Rewrite",
    "RewriteError",
    "Rewriter",
    "RulePass",
    "Run",
    "Scaling",
    "Sent",
    "SideEffectError",
    "Slot",
    "Spot",
    "Start",
    "StateKey",
    "UserFunction",
    "Value",
    "Wait",
    "Work",
    "apply_passes",
    "are_alike",
    "asserts",
    "backend_flags",
    "brought",
    "capture",
    "captured_for",
    "carry",
    "check_rule",
    "check_stages",
    "check_steps",
    "class_text",
    "communication",
    "communication_text",
    "compiled",
    "complete",
    "count_ops",
    "crosses",
    "described",
    "dispatch_modes",
    "draws",
    "executed_code",
    "first_alike",
    "holds_of",
    "in_two",
    "is_admitted",
    "is_drawing",
    "is_lifted",
    "is_plain",
    "is_pure",
    "is_view",
    "joined",
    "libraries_of",
    "lies_as",
    "linear_tail",
    "live_memory",
    "load_program",
    "looked_at",
    "machine",
    "made_states",
    "map_values",
    "meaning_of",
    "meaning_or_none",
    "measure_of",
    "memories",
    "meshes_of",
    "modes_on",
    "name_of",
    "new_state",
    "no_program",
    "node_text",
    "note_step",
    "numbered",
    "observed",
    "overwriting",
    "parse_layouts",
    "program_data",
    "record_forward",
    "record_gradients",
    "record_piece",
    "record_update",
    "refuse_writing",
    "register_pass",
    "register_rewrite",
    "registered_passes",
    "registered_rewrites",
    "rewrite",
    "runner",
    "runs_users_code",
    "save_kernels",
    "save_program",
    "saving_is_hooked",
    "slots_of",
    "specs_data",
    "specs_in",
    "specs_of",
    "spread",
    "strides_of",
    "tensor_dtype",
    "to_fx",
    "told",
    "type_text",
    "values_in",
    "verify",
    "with_kernels",
    "with_layouts",
    "work_of",
    "write_whole",
    "writes_outside",
    "writes_to",
    "written_inputs",
]
