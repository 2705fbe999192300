"""Programs: capture, layout completion, recording for each rank, verification, rewrites and execution."""

from ._admitted import is_admitted, libraries_of
from ._alike import are_alike, first_alike, specs_data, specs_in, specs_of
from ._brought import Sent, brought, meshes_of
from ._capture import Capture, Slot, capture, captured_for, slots_of
from ._cells import overwriting
from ._complete import complete, with_layouts
from ._draft import Draft, Spot
from ._driver import Edit, rewrite
from ._dynamic import Fits, Holds, holds_of
from ._effects import asserts, crosses, draws, is_drawing, is_pure, is_view, writes_to
from ._encode import program_data
from ._errors import CaptureError, ProgramError, ProgramFileError, RewriteError, SideEffectError
from ._execute import Run, runner, to_fx
from ._file import load_program, no_program, save_program, told, write_whole
from ._imagine import strides_of
from ._inductor import Kernels, compiled
from ._infer import Names
from ._interception import Hook, UserFunction
from ._join import joined
from ._layouts import Layouts, parse_layouts
from ._linear_tail import linear_tail
from ._loss_scale import HELD, LOSS_SCALE, Scaling
from ._match import Match
from ._meaning import meaning_of, meaning_or_none
from ._measure import Measure, measure_of
from ._memory import LiveMemory, Memories, live_memory, looked_at, memories, refuse_writing, written_inputs
from ._node import (
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
from ._outside import check_stages, writes_outside
from ._package import machine, save_kernels, with_kernels
from ._pass import (
    OwnRules,
    Pass,
    RulePass,
    apply_passes,
    register_pass,
    register_rewrite,
    registered_passes,
    registered_rewrites,
)
from ._piece import Piece, record_piece
from ._program import Change, Input, Program, communication, communication_text, count_ops
from ._read_back import ReadBack
from ._record import record_forward, record_gradients
from ._recording import is_lifted
from ._rewrite import AnyRewrite, Rewrite, Rewriter
from ._rule_test import check_rule, check_steps
from ._spread import spread
from ._text import node_text, numbered, type_text
from ._update_apart import InTwo, LookAt, Looking, in_two
from ._verify import verify
from ._watch import carry
from ._work import Work, work_of
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
