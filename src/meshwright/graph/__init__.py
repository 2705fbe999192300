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

from ._errors import CaptureError, HiddenTensorError, ProgramError, ProgramFileError, RewriteError, SideEffectError
from .analysis.linear_tail import linear_tail
from .analysis.live_memory import (
    AliasClasses,
    LiveMemory,
    alias_classes,
    alias_pairs,
    live_memory,
    refuse_writing,
    written_inputs,
)
from .analysis.node_work import NodeWork, work_of
from .analysis.strides import strides_of
from .analysis.verify import verify
from .captures.capture import Capture, ModelTensor, capture, captured_for, model_tensors
from .captures.external_writes import check_stages, writes_external_tensors
from .captures.interception import Hook, UserFunction
from .completion.batch_copies import copy_batch_inputs
from .completion.layout_completion import complete, with_layouts
from .completion.stage_sends import StageSend, meshes_of, with_stage_sends
from .execution.fx_runner import Run, runner, to_fx
from .execution.inductor import CompiledKernels, compiled
from .execution.kernel_files import machine, save_kernels, with_kernels
from .execution.two_part_step import GradientInspector, InspectedStep, TwoPartStep, split_before_update
from .files.admitted_operators import is_admitted, libraries_of
from .files.alike_ranks import are_alike, first_alike, read_specs, specs_data, specs_in
from .files.canonical_text import canonical_text, canonical_text_or_none
from .files.encode import program_data
from .files.program_file import convert_file_errors, load_program, program_file_error, save_program
from .guards import (
    OWN,
    Executed,
    FastComparison,
    Guards,
    class_text,
    described,
    executed_code,
    is_plain,
    observed,
)
from .program.backward_reads import BackwardReads
from .program.draft import Draft, Spot
from .program.effects import (
    is_assertion,
    is_cross_mesh,
    is_pure,
    is_random_call,
    is_random_operator,
    is_view,
    writes_to,
)
from .program.layouts import Layouts, parse_layouts
from .program.node import (
    ALWAYS,
    EVERYWHERE,
    ChunkConversion,
    Conversion,
    Node,
    Op,
    Origin,
    Overwrite,
    Start,
    Value,
    Wait,
    map_values,
    name_of,
    tensor_dtype,
    values_in,
)
from .program.node_text import node_text, type_text
from .program.program import Change, Input, Program, communication, communication_text, count_ops
from .program.shape_inference import FreshNames
from .recording.dynamic_sizes import BatchPredicate, SizeConditions, read_size_conditions
from .recording.functionalization import overwriting
from .recording.recording import is_lifted
from .replay.joined_programs import join_programs
from .replay.loss_scale import HELD, LOSS_SCALE, Scaling
from .replay.model_piece import ModelPiece, record_piece
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
from .rewriting.rule_check import check_rule
from .torch_hooks import (
    Operator,
    backend_flags,
    dispatch_modes,
    is_autocast_on,
    modes_on,
    note_step,
    saving_is_hooked,
    tensor_comparison,
)
from .update import StateKey, made_states, new_state, record_update, runs_users_code, unsharded_state_spec

__all__ = [
    "ALWAYS",
    "EVERYWHERE",
    "HELD",
    "LOSS_SCALE",
    "OWN",
    "AliasClasses",
    "AnyRewrite",
    "BackwardReads",
    "BatchPredicate",
    "Capture",
    "CaptureError",
    "Change",
    "ChunkConversion",
    "CompiledKernels",
    "Conversion",
    "Draft",
    "Edit",
    "Executed",
    "FastComparison",
    "FreshNames",
    "GradientInspector",
    "Guards",
    "HiddenTensorError",
    "Hook",
    "Input",
    "InspectedStep",
    "Layouts",
    "LiveMemory",
    "Match",
    "ModelPiece",
    "ModelTensor",
    "Node",
    "NodeWork",
    "Op",
    "Operator",
    "Origin",
    "Overwrite",
    "OwnRules",
    "Pass",
    "Program",
    "ProgramError",
    "ProgramFileError",
    "Rewrite",
    "RewriteError",
    "Rewriter",
    "RulePass",
    "Run",
    "Scaling",
    "SideEffectError",
    "SizeConditions",
    "Spot",
    "StageSend",
    "Start",
    "StateKey",
    "TwoPartStep",
    "UserFunction",
    "Value",
    "Wait",
    "alias_classes",
    "alias_pairs",
    "apply_passes",
    "are_alike",
    "backend_flags",
    "canonical_text",
    "canonical_text_or_none",
    "capture",
    "captured_for",
    "check_rule",
    "check_stages",
    "class_text",
    "communication",
    "communication_text",
    "compiled",
    "complete",
    "convert_file_errors",
    "copy_batch_inputs",
    "count_ops",
    "described",
    "dispatch_modes",
    "executed_code",
    "first_alike",
    "is_admitted",
    "is_assertion",
    "is_autocast_on",
    "is_cross_mesh",
    "is_lifted",
    "is_plain",
    "is_pure",
    "is_random_call",
    "is_random_operator",
    "is_view",
    "join_programs",
    "libraries_of",
    "linear_tail",
    "live_memory",
    "load_program",
    "machine",
    "made_states",
    "map_values",
    "meshes_of",
    "model_tensors",
    "modes_on",
    "name_of",
    "new_state",
    "node_text",
    "note_step",
    "observed",
    "overwriting",
    "parse_layouts",
    "program_data",
    "program_file_error",
    "read_size_conditions",
    "read_specs",
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
    "specs_data",
    "specs_in",
    "split_before_update",
    "strides_of",
    "tensor_comparison",
    "tensor_dtype",
    "to_fx",
    "type_text",
    "unsharded_state_spec",
    "values_in",
    "verify",
    "with_kernels",
    "with_layouts",
    "with_stage_sends",
    "work_of",
    "writes_external_tensors",
    "writes_to",
    "written_inputs",
]
