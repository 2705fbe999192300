"""In-place operators whose operands share memory: torch's error on every rank and layout, or one device's result."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor.views.write_overlap import reserved_memory

LAYOUTS: list[tuple[int, Any]] = [
    (1, mw.Shard(0)),
    (2, mw.Replicate()),
    (2, mw.Partial()),
    (3, mw.Shard(0)),
    (7, mw.Shard(1)),
]
"""Ranks and placements: an axis of size 1, uneven parts, and parts without elements."""

OPERANDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "itself": lambda x: (x, x),
    "the same rows": lambda x: (x[1:4], x[1:4]),
    "the row before": lambda x: (x[1:4], x[:3]),
    "the row behind": lambda x: (x[:3], x[1:4]),
    "the other half": lambda x: (x[:2], x[2:4]),
    "the columns before": lambda x: (x[:, 1:], x[:, :-1]),
    "every other row": lambda x: (x[::2], x[1::2]),
    "the transpose": lambda x: (x, x.t()),
    "shifted elements": lambda x: (x.view(-1)[1:], x.view(-1)[:-1]),
    "an expanded row": lambda x: (x[:1].expand(4, 4), x),
}
VALUES: dict[str, Any] = {"Scalar": 2, "number": 2, "float": 0.5, "int": 0, "bool": False, "Optional[Scalar]": None}


def in_place_operators() -> list[Any]:
    """Return the overloads that write to `self` and take at least one more tensor."""
    found: list[Any] = []
    for schema in torch._C._jit_get_all_schemas():
        tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
        if not schema.name.startswith("aten::") or not schema.name.endswith("_") or len(tensors) < 2:
            continue
        first = schema.arguments[0].alias_info
        if first is not None and first.is_write and not schema.name.startswith(("aten::_", "aten::set")):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            found.append(getattr(packet, schema.overload_name or "default"))
    return found


def arguments(op: Any, other: Tensor, index: Callable[[Tensor], Tensor]) -> list[Any] | None:
    """Return the arguments after the first one; None if the schema has another type."""
    found: list[Any] = []
    for a in op._schema.arguments[1:]:
        if a.name == "index":
            found.append(index(torch.arange(other.shape[0])))
        elif str(a.type) == "Tensor":
            found.append(other > 3 if a.name == "mask" else other)
        elif not a.has_default_value() and not a.kwarg_only:
            if str(a.type) not in VALUES:
                return None
            found.append(VALUES[str(a.type)])
        elif not a.kwarg_only:
            found.append(a.default_value)
    return found


def outcome(op: Any, which: str, lay: Callable[[Tensor], Tensor]) -> list[Any]:
    x = lay(((torch.arange(16.0) * 7) % 11 - 3).view(4, 4))
    written, other = OPERANDS[which](x)
    given = arguments(op, other, lay)
    if given is None:
        return ["no arguments"]
    try:
        op(written, *given)
    except mw.MeshwrightError as error:
        return ["overlap" if "unsupported operation" in str(error) else "refused", x.tolist()]
    except Exception as error:
        return ["overlap" if "unsupported operation" in str(error) else "raised", x.tolist()]
    return ["done", x.tolist()]


@cache
def cases() -> list[tuple[Any, str, list[Any]]]:
    """Return operators and operands with the outcome on one device, if that is a result or an error of overlap."""
    tried = [(op, which, outcome(op, which, torch.clone)) for op in in_place_operators() for which in OPERANDS]
    return [case for case in tried if case[2][0] in ("done", "overlap")]


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda n: str(LAYOUTS[n]))
@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
def test_in_place_operators_of_operands_that_share_memory(number: int) -> None:
    """Each layout takes another part of the operators; a call without a defined result may be refused."""
    (ranks, placement), known = LAYOUTS[number], cases()
    assert len(known) > 400
    known = known[number :: 6 * len(LAYOUTS)]

    def program() -> list[Any]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])

        def lay(x: Tensor) -> Tensor:
            return mw.shard_tensor(x, mesh, [mw.Shard(0) if placement == mw.Shard(1) and x.ndim == 1 else placement])

        return [outcome(op, which, lay) for op, which, _ in known]

    for found in mw.simulate(program, ranks):
        for (op, which, wanted), mine in zip(known, found, strict=True):
            if wanted[0] == "overlap":
                assert mine == wanted, (op, which)
            elif mine[0] != "refused":
                assert mine[0] == "done", (op, which)
                torch.testing.assert_close(mine[1], wanted[1], equal_nan=True, msg=f"{op} of {which}")


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "out= of an operand": lambda x: torch.add(x, 1, out=x),
    "out= of a part of an operand": lambda x: torch.add(x[:-1], 1, out=x[1:]),
    "gather with out= of its operand": lambda x: torch.gather(x, 0, (x * 0).long(), out=x),
    "cat with out= of its operands": lambda x: torch.cat([x[:2], x[:2]], out=x),
    "augmented assignment": lambda x: x[1:].__imul__(x[:-1]),
    "a row to all rows": lambda x: x.__setitem__(slice(None), x[1]),
    "columns to the left": lambda x: x.__setitem__((slice(None), slice(-1)), x[:, 1:]),
    "columns to the right": lambda x: x.__setitem__((slice(None), slice(1, None)), x[:, :-1]),
    "one column from all": lambda x: x.sub_(x[:, :1]),
    "a call twice": lambda x: [x.mul_(x) for _ in range(2)],
    "a number of the tensor": lambda x: x.fill_(x[0, 0]),
}
UNDEFINED = ("columns to the right", "one column from all")
"""Calls that torch carries out, with a result that depends on the order of the elements."""


@pytest.mark.parametrize(("ranks", "placement"), LAYOUTS, ids=str)
def test_other_calls_of_operands_that_share_memory(ranks: int, placement: Any) -> None:
    def found(call: str, lay: Callable[[Tensor], Tensor]) -> list[Any]:
        x = lay(torch.arange(12.0).view(4, 3))
        try:
            CALLS[call](x)
        except RuntimeError as error:
            return ["overlap" if "unsupported operation" in str(error) else "refused", x.tolist()]
        return ["done", x.tolist()]

    def program() -> list[Any]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        return [found(call, lambda x: mw.shard_tensor(x, mesh, [placement])) for call in CALLS]

    wanted = [found(call, torch.clone) for call in CALLS]
    for mine in mw.simulate(program, ranks):
        for call, a, b in zip(CALLS, mine, wanted, strict=True):
            assert a == b or (call in UNDEFINED and a[0] == "refused"), call


def test_a_huge_tensor_is_compared_without_its_memory() -> None:
    def program() -> None:
        whole = 1 << 21
        part = reserved_memory(whole * whole // 2).view(whole // 2, whole)
        x = mw.dtensor_from_local(part, mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])
        with pytest.raises(mw.MeshwrightError, match="unsupported operation"):
            x.mul_(x.t())
        with pytest.raises(mw.MeshwrightError, match="order in which a kernel visits"):
            x.addmm_(x, x)

    mw.simulate(program, 2)
