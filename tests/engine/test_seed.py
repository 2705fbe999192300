"""The four examples the library grew from, as tests."""

from __future__ import annotations

import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import DistTensor

COLUMNS_UNASKED = """\
call    operand        becomes       by                bytes  result
matmul  f32[4, 8]      f32[4, 8@tp]  Slice(tp, dim 1)      0  f32[4, 6] +tp
        f32[8@tp, 6]
relu    f32[4, 6] +tp  f32[4, 6]     AllReduce(tp)        96  f32[4, 6]
rank 0: 1 all_reduce, 96 bytes received"""


def test_a_two_shardings_give_each_of_six_ranks_a_part_of_2_1() -> None:
    mesh = mw.ProcessMesh([[0, 1, 2], [3, 4, 5]], ["x", "y"])
    whole = torch.arange(12.0).reshape(4, 3)
    parts = mw.simulate(lambda: mw.shard_tensor(whole, mesh, [mw.Shard(0), mw.Shard(1)]).to_local(), 6)
    assert [tuple(part.shape) for part in parts] == [(2, 1)] * 6
    for rank, part in enumerate(parts):
        row, column = divmod(rank, 3)
        assert torch.equal(part, whole[2 * row : 2 * row + 2, column : column + 1])


def test_b_replicated_on_two_ranks_becomes_sharded_on_two_others() -> None:
    left, right = mw.ProcessMesh([0, 1], ["x"]), mw.ProcessMesh([2, 3], ["x"])
    whole = torch.arange(12.0).reshape(4, 3)

    def program() -> tuple[Tensor, Tensor]:
        y = mw.reshard(mw.shard_tensor(whole, left, [mw.Replicate()]), right, [mw.Shard(0)])
        assert (y.mesh, y.placements, y.shape) == (right, (mw.Shard(0),), (4, 3))
        return y.to_local(), mw.unshard_dtensor(y)

    results = mw.simulate(program, 4)
    assert torch.equal(torch.cat([part for part, _ in results[2:]]), whole)
    assert [part.numel() for part, _ in results[:2]] == [0, 0]
    assert all(torch.equal(value, whole) for _, value in results)


def rows_cut() -> DistTensor:
    mesh = mw.ProcessMesh([0, 1], ["tp"])
    a = mw.shard_tensor(torch.arange(32.0).reshape(4, 8) - 16, mesh, [mw.Replicate()])
    b = mw.shard_tensor(torch.arange(48.0).reshape(8, 6) - 24, mesh, [mw.Shard(0)])
    c = torch.matmul(a, b)
    assert c.placements == (mw.Partial(),)
    return torch.relu(c)


def test_c_a_is_sharded_automatically_and_relu_reduces_the_sum() -> None:
    texts = mw.simulate(lambda: str(mw.explain(rows_cut)), 2)
    assert texts == [COLUMNS_UNASKED, COLUMNS_UNASKED.replace("rank 0", "rank 1")]


def test_c_the_numbers_are_those_of_one_device() -> None:
    whole = torch.relu((torch.arange(32.0).reshape(4, 8) - 16) @ (torch.arange(48.0).reshape(8, 6) - 24))
    for value in mw.simulate(lambda: mw.unshard_dtensor(rows_cut()), 2):
        torch.testing.assert_close(value, whole)


def test_c_is_explained_without_any_ranks() -> None:
    assert str(mw.explain(rows_cut)) == COLUMNS_UNASKED


def two_matmuls(x: Tensor, first: Tensor, second: Tensor, across: bool) -> tuple[Tensor, ...]:
    """Return loss and gradients of relu(x @ first) @ second."""
    here, there = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), mw.ProcessMesh([[4, 5], [6, 7]], ["dp", "tp"])
    if across:
        x = mw.shard_tensor(x, here, [mw.Shard(0), mw.Replicate()])
        first = mw.shard_tensor(first, here, [mw.Replicate(), mw.Shard(1)])
        second = mw.shard_tensor(second, there, [mw.Replicate(), mw.Shard(0)])
    hidden = torch.relu(x @ first)
    if across:
        hidden = mw.reshard(hidden, there, [mw.Shard(0), mw.Shard(1)])
    loss = (hidden @ second).square().mean()
    loss.backward()
    assert x.grad is not None
    assert first.grad is not None
    assert second.grad is not None
    return tuple(mw.unshard_dtensor(t) for t in (loss, x.grad, first.grad, second.grad))


def test_d_a_layer_on_each_of_two_meshes_forward_and_backward() -> None:
    torch.manual_seed(0)
    shapes = [(6, 8), (8, 10), (10, 4)]
    x, first, second = (torch.randn(shape, requires_grad=True) for shape in shapes)
    results = mw.simulate(two_matmuls, 8, x, first, second, True)
    whole = two_matmuls(x, first, second, False)
    for result in results:
        torch.testing.assert_close(result, whole)
