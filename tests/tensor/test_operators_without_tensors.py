"""Operators that return no tensor give one device's result; only questions about memory are refused.

The operators come from torch's schemas: those of `torch.ops.aten` that take tensors and return none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw

MESH = mw.ProcessMesh(range(2), ["x"])
VALUES = {"int": 0, "MemoryFormat": torch.contiguous_format, "number": 1.5, "float": 1.0, "bool": False}
ABOUT_MEMORY = (
    "_debug_has_internal_overlap", "_fused_sdp_choice", "_version", "get_device", "output_nr", "storage_offset",
    "sym_storage_offset",
)  # fmt: skip
"""Operators that return facts about this rank's memory, its device or autograd's graph."""


def questions() -> Iterator[tuple[Any, list[str]]]:
    """Yield each operator and the types of its required arguments."""
    for schema in sorted(torch._C._jit_get_all_schemas(), key=str):
        types = [str(a.type) for a in schema.arguments if not a.has_default_value()]
        results = [str(r.type) for r in schema.returns]
        if not schema.name.startswith("aten::") or not results or "Tensor" not in types:
            continue
        if any(r == "t" or "Tensor" in r for r in results) or not set(types) <= {"Tensor", *VALUES}:
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        yield getattr(packet, schema.overload_name or "default"), types


def _answer(op: Any, types: list[str], x: Tensor) -> Any:
    try:
        return op(*(x if name == "Tensor" else VALUES[name] for name in types))
    except Exception as error:  # refused, with various errors
        return error


def test_an_operator_without_tensor_results_equals_one_device() -> None:
    asked = list(questions())
    assert len(asked) > 60

    def wrong(value: Tensor) -> list[str]:
        x = mw.shard_tensor(value, MESH, [mw.Shard(0) if value.ndim else mw.Replicate()])
        return [str(op) for op, types in asked if not _agree(op, _answer(op, types, x), _answer(op, types, value))]

    for value in (torch.ones(4, 6), torch.ones(3, 2, dtype=torch.int64).t(), torch.ones(())):
        assert mw.simulate(lambda value=value: wrong(value), 2) == [[], []]


def _agree(op: Any, mine: Any, goal: Any) -> bool:
    if isinstance(mine, mw.MemoryAccessError):
        return op._schema.name.removeprefix("aten::") in ABOUT_MEMORY
    return isinstance(mine, Exception) if isinstance(goal, Exception) else bool(mine == goal)


def test_a_function_that_reads_a_dtype_runs() -> None:
    x, y = torch.randn(4, 6), torch.randn(6)
    want = F.cosine_similarity(x, y, dim=1)

    def on_rank() -> Tensor:
        def mark(t: Tensor, place: Any) -> Tensor:
            return mw.shard_tensor(t, MESH, [place])

        return mw.unshard_dtensor(F.cosine_similarity(mark(x, mw.Shard(0)), mark(y, mw.Replicate()), dim=1))

    for found in mw.simulate(on_rank, 2):
        torch.testing.assert_close(found, want)
