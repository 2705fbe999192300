"""Detection of programs that add to computed indices, for which Inductor needs an option for plain indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..program.node import Node, Value, name_of
from ..program.program import Program
from ..torch_hooks import PLAIN_INDICES
from .fx_runner import origin_of

ADDING = (
    *("embedding_dense_backward", "embedding_bag", "index_put", "index_add", "index_reduce", "aten.put"),
    *("scatter_add", "scatter_reduce", "unfold_backward", "upsample", "pool", "grid_sampler", "col2im"),
)
"""Parts of the names of operators that become additions to indexed elements of a tensor."""


def options_for(program: Program) -> Mapping[str, Any]:
    """Return Inductor's options for a program: plain indices if it adds to elements at indices that it computes.

    Indices that are inputs are read from memory, and are correct with either option.
    """
    given = {i.value for i in program.inputs}
    return PLAIN_INDICES if any(_computes_indices(program, node, given) for node in program.nodes) else {}


def _computes_indices(program: Program, node: Node, given: set[Value]) -> bool:
    if not any(part in name_of(node.op) for part in ADDING):
        return False
    whole = [v for v in node.ins if isinstance(v.dtype, torch.dtype) and not v.dtype.is_floating_point]
    return not whole or any(origin_of(program, v) not in given for v in whole)
