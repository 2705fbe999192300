"""Text of a captured program that is equal in all processes that capture the same call."""

from __future__ import annotations

import json

from meshwright.layout import JsonValue

from .._errors import ProgramFileError
from ..guards import described
from ..program.node_text import numbered
from ..program.program import Program
from ..torch_hooks import Operator
from .encode import program_data

_NAMESPACES = frozenset({"aten", "prims", "meshwright"})


def canonical_text(program: Program) -> str:
    """Return the program as text, without its rank, record of changes, source lines and names of values.

    Symbols are numbered in order of appearance; their recorded sizes are left out.

    Raises:
        ProgramFileError: the program contains Python code that is in no table.
    """
    data, constants = program_data(program)
    origins = [[phase, layer, *modes] for phase, layer, _, *modes in data["origins"]]
    nodes = [[*node, origins[at]] for *node, at in data["nodes"]]
    inputs = [[at, role, "" if role == "saved" else name, *rest] for at, role, name, *rest in data["inputs"]]
    left: dict[str, JsonValue] = {
        k: v for k, v in data.items() if k not in ("rank", "changes", "origins", "symbols", "torch")
    }
    held = {name: described(x) for name, x in constants.items()}
    values = [row[1:] for row in data["values"]]
    return numbered(json.dumps([{**left, "inputs": inputs, "nodes": nodes, "values": values}, held]))


def canonical_text_or_none(program: Program) -> str | None:
    """Return `canonical_text(program)`; None if the program has operators of other libraries or cannot be saved.

    The text is computed once, unless the program has constants, whose numbers may change.
    """
    if any(i.role == "constant" for i in program.inputs):
        return _text_or_none(program)
    known = vars(program)
    if _TEXT not in known:
        known[_TEXT] = _text_or_none(program)
    return known[_TEXT]


_TEXT = "_canonical_text"


def _text_or_none(program: Program) -> str | None:
    if any(isinstance(n.op, Operator) and n.op.namespace not in _NAMESPACES for n in program.nodes):
        return None
    try:
        return canonical_text(program)
    except ProgramFileError:
        return None
