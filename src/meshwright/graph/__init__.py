"""Programs: captured, completed, recorded per rank, checked, rewritten, run."""

from ._draft import Draft, Spot
from ._effects import draws, is_pure, is_view, writes_to
from ._errors import CaptureError, ProgramError, RewriteError, SideEffectError
from ._node import Carry, Node, Op, Origin, Value, map_values, name_of, size_hint, values_in
from ._program import Change, Input, Program, communication, communication_text, count_ops
from ._text import node_text, type_text
from ._verify import verify

__all__ = [
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
    "SideEffectError",
    "Spot",
    "Value",
    "communication",
    "communication_text",
    "count_ops",
    "draws",
    "is_pure",
    "is_view",
    "map_values",
    "name_of",
    "node_text",
    "size_hint",
    "type_text",
    "values_in",
    "verify",
    "writes_to",
]
