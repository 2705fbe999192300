"""Inferred shapes and dtypes are those of a run of the operator, also when an earlier call was nearly the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.graph import FreshNames, Value
from meshwright.graph.program.shape_inference import infer
from meshwright.layout import TorchValue

aten = torch.ops.aten
FLOATS, INTS = Value("x", (4, 6), torch.float32), Value("i", (4, 6), torch.int64)
PAIRS: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
    (aten.add.Tensor, (INTS, 1), (INTS, 1.0)),
    (aten.add.Tensor, (INTS, True), (FLOATS, True)),
    (aten.mul.Tensor, (INTS, 2), (INTS, 2j)),
    (aten.sum.dim_IntList, (FLOATS, [0]), (FLOATS, [1])),
    (aten.sum.dim_IntList, (FLOATS, [0], False), (FLOATS, [0], True)),
    (aten.sum.dim_IntList, (FLOATS, [0]), (Value("y", (5, 6), torch.float32), [0])),
    (aten.split.Tensor, (FLOATS, 2), (FLOATS, 4)),
    (aten.split.Tensor, (FLOATS, 2), (FLOATS, 2, 1)),
    (aten.native_layer_norm.default, (FLOATS, [6], None, None, 1e-5), (FLOATS, [4, 6], None, None, 1e-5)),
    (aten.cat.default, ([FLOATS, FLOATS],), ([FLOATS, INTS],)),
    (aten.cat.default, ([FLOATS, FLOATS],), ([FLOATS, FLOATS, FLOATS],)),
]


def of_torch(op: Any, args: tuple[Any, ...]) -> Any:
    """Return shapes and dtypes of a real run."""

    def made(x: Any) -> Any:
        if isinstance(x, Value):
            assert isinstance(x.dtype, torch.dtype)
            return torch.zeros(x.shape, dtype=x.dtype)
        return [made(y) for y in x] if isinstance(x, list) else x

    return described(op(*map(made, args)))


def described(found: TorchValue) -> Any:
    if isinstance(found, (Tensor, Value)):
        return tuple(found.shape), found.dtype
    return [described(x) for x in found]


@pytest.mark.parametrize(("op", "one", "other"), PAIRS, ids=lambda x: str(x) if callable(x) else "")
def test_calls_that_differ_in_one_argument_have_their_own_results(op: Any, one: Any, other: Any) -> None:
    for args in (one, other, one, other):
        assert described(infer(op, args, {}, 0, FreshNames())) == of_torch(op, args)


def test_each_result_has_values_and_names_of_its_own() -> None:
    names = FreshNames()
    first, second = (infer(aten.neg.default, (FLOATS,), {}, 0, names) for _ in range(2))
    assert first is not second
    assert (first.name, second.name) == ("neg", "neg_1")


def test_the_default_dtype_and_autocast_decide() -> None:
    def dtype(op: Any, *args: Any) -> Any:
        return infer(op, args, {}, 0, FreshNames()).dtype

    row = Value("w", (6, 4), torch.float32)
    for _ in range(2):
        assert dtype(aten.div.Tensor, INTS, 2) is torch.float32
        assert dtype(aten.mm.default, FLOATS, row) is torch.float32
        with torch.autocast("cpu"):
            assert dtype(aten.mm.default, FLOATS, row) is torch.bfloat16
        torch.set_default_dtype(torch.float64)
        try:
            assert dtype(aten.div.Tensor, INTS, 2) is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_sizes_that_depend_on_numbers_are_never_shared() -> None:
    first, second = (infer(aten.nonzero.default, (FLOATS,), {}, 0, FreshNames()) for _ in range(2))
    assert first.shape[0].node.shape_env is not second.shape[0].node.shape_env
