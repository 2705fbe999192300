"""Views of distributed tensors: writes on one side are read on the other, sharded or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import operators_recorded
from meshwright.tensor.torch_hooks import interception

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda x: x[1:4].mul_(2),
    "one row": lambda x: x[-1].zero_(),
    "rows of columns": lambda x: x[:, 1:3][2:].add_(1),
    "a view of a view of a view": lambda x: x.view(-1)[3:20].view(-1)[5:7].fill_(7),
    "transposed": lambda x: x.t()[1].sub_(3),
    "diagonal": lambda x: x.diagonal().mul_(-1),
    "a piece": lambda x: x.chunk(3)[1].neg_(),
    "by index": lambda x: x.__setitem__((slice(None, None, 2), 1), 5.0),
    "by mask": lambda x: x.__setitem__(x > 0, 0.5),
    "by rows": lambda x: x.__setitem__([0, 3], torch.ones(2, 6)),
}
LAYOUTS: dict[str, list[Any]] = {
    "whole": [],
    "rows": [mw.Shard(0)],
    "columns": [mw.Shard(1)],
    "grid": [mw.Shard(0), mw.Shard(1)],
    "terms": [mw.Partial(), mw.Shard(0)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_a_view_reaches_the_tensor(write: str, layout: str) -> None:
    torch.manual_seed(0)
    plain = torch.randn(5, 6)

    def on_rank() -> Tensor:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["a", "b"])
        x = mw.shard_tensor(plain.clone(), mesh, LAYOUTS[layout])
        WRITES[write](x)
        return mw.unshard_dtensor(x)

    found = mw.simulate(on_rank, 4)
    WRITES[write](plain)
    for x in found:
        torch.testing.assert_close(x, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_gets_writes_to_its_base(layout: str) -> None:
    def program(x: Tensor, whole: Callable[[Tensor], Tensor]) -> list[Tensor]:
        rows, inner = x[1:4], x[1:4][:, 2:]
        x.mul_(3)
        inner.add_(1)
        return [whole(rows.clone()), whole(inner * 2), whole(x)]

    torch.manual_seed(0)
    plain = torch.randn(5, 6)

    def on_rank() -> list[Tensor]:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["a", "b"])
        return program(mw.shard_tensor(plain.clone(), mesh, LAYOUTS[layout]), mw.unshard_dtensor)

    for found in mw.simulate(on_rank, 4):
        torch.testing.assert_close(found, program(plain.clone(), lambda t: t))


def test_a_list_function_writes_a_view_and_its_base_in_order():
    """The view has memory of its own on these ranks; the base is written to after the view, in the same call."""

    def program(x):
        view = x[1:3]
        torch._foreach_add_([view, x, view], [1.0, 2.0, 4.0])
        torch._foreach_mul_([x[0:4], x], [2.0, 3.0])
        return [x, view]

    wanted = [t.tolist() for t in program(torch.arange(12.0).view(6, 2))]

    def ranks():
        x = mw.shard_tensor(torch.arange(12.0).view(6, 2), mw.ProcessMesh(range(4), ["x"]), [mw.Shard(0)])
        return [mw.unshard_dtensor(t).tolist() for t in program(x)]

    assert mw.simulate(ranks, 4) == [wanted] * 4


def test_a_filled_expansion_fills_its_base_on_ranks_without_a_part() -> None:
    def on_rank() -> Tensor:
        mesh = mw.ProcessMesh(range(4), ["a"])
        base = mw.shard_tensor(torch.zeros(5, 1, 1), mesh, [mw.Replicate()])
        base.expand_as(mw.shard_tensor(torch.zeros(5, 5, 5), mesh, [mw.Shard(2)])).fill_(2)
        return base.to_local()

    for local in mw.simulate(on_rank, 4):
        assert local.eq(2).all()


def test_a_list_function_is_recorded_entry_by_entry_if_layouts_differ() -> None:
    def on_rank() -> Any:
        mesh = mw.ProcessMesh([0, 1], ["a"])
        x, y = (mw.shard_tensor(torch.arange(4.0) + n, mesh, [p]) for n, p in enumerate((mw.Shard(0), mw.Replicate())))
        seen: list[str] = []
        with operators_recorded(lambda op, *_: seen.append(str(op))), interception():
            out = torch._foreach_add([x, y], [y, x])
        return [mw.unshard_dtensor(t).tolist() for t in out], seen.count("aten.add.Tensor")

    assert mw.simulate(on_rank, 2) == [([[1.0, 3.0, 5.0, 7.0]] * 2, 2)] * 2


def test_a_write_to_a_row_of_windows_that_share_elements_reaches_the_tensor() -> None:
    def program(x: Tensor) -> list[list[float]]:
        row = x.unfold(-1, 2, 1)[1]
        row[1:, 1].fill_(9)
        row[:1].sub_(2)
        return x.tolist()

    def on_rank() -> list[list[float]]:
        return program(mw.shard_tensor(torch.arange(24.0).view(6, 4), mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)]))

    assert mw.simulate(on_rank, 2) == [program(torch.arange(24.0).view(6, 4))] * 2
