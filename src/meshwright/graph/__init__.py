"""Programs: captured, completed, recorded per rank, checked, rewritten, run."""

from ._capture import Capture, Slot, capture, slots_of
from ._draft import Draft, Spot
from ._effects import draws, is_pure, is_view, writes_to
from ._errors import CaptureError, ProgramError, RewriteError, SideEffectError
from ._execute import Run, numbers_of, runner, to_fx
from ._join import joined
from ._node import Carry, Node, Op, Origin, Value, map_values, name_of, size_hint, values_in
from ._program import Change, Input, Program, communication, communication_text, count_ops
from ._record import record_forward, record_gradients
from ._text import node_text, type_text
from ._update import StateKey, record_update
from ._verify import verify

__all__ = [
    "Capture",
    "CaptureError",
    "Carry",
    "Change",
    "Draft",
    "Input",
    "Node",
    "Op",
    "Origin",
    "Program",
    "ProgramError",
    "RewriteError",
    "Run",
    "SideEffectError",
    "Slot",
    "Spot",
    "StateKey",
    "Value",
    "capture",
    "communication",
    "communication_text",
    "count_ops",
    "draws",
    "is_pure",
    "is_view",
    "joined",
    "map_values",
    "name_of",
    "node_text",
    "numbers_of",
    "record_forward",
    "record_gradients",
    "record_update",
    "runner",
    "size_hint",
    "slots_of",
    "to_fx",
    "type_text",
    "values_in",
    "verify",
    "writes_to",
]
