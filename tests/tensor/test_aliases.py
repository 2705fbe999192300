"""Views and copies of distributed tensors follow the whole tensor's strides, the same on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from benchmarks import aliases

STORIES = list(aliases.stories())


@pytest.mark.parametrize("start", range(4))
def test_view_operators_share_the_memory_that_one_device_shares(start: int) -> None:
    """A sample of the benchmark `aliases`, with another part of its programs in each layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, layout in enumerate(aliases.LAYOUTS):
            sample = STORIES[(start * 31 + k * 7) % 157 :: 157]
            found = aliases.sweep(sample, [layout])
            wrong = [f"{s.name}, {where}: {f.message}" for s, where, f in found if f and f.status != "refused"]
            assert not wrong, "\n".join(wrong)


def test_a_loop_that_writes_rows_has_the_gradient_of_one_device_on_an_axis_of_size_1() -> None:
    def grads() -> list[float]:
        x = mw.shard_tensor(torch.arange(4.0), mw.ProcessMesh([0], ["x"]), [mw.Shard(0)]).requires_grad_()
        y = torch.zeros_like(x)
        for i in range(4):
            y[i] = x[i] * x[i]
        y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert mw.simulate(grads, 1) == [[0.0, 2.0, 4.0, 6.0]]


def on_four(program: Any, placements: list[Any], shape: tuple[int, ...] = (4, 3)) -> list[Any]:
    """Return the result of the program on each of four ranks, by rank, for a tensor of this shape."""
    mesh = mw.ProcessMesh(range(4), ["x"])
    count = torch.Size(shape).numel()
    return mw.simulate(lambda: program(mw.shard_tensor(torch.arange(count * 1.0).view(shape), mesh, placements)), 4)


def test_contiguous_copies_a_slice_even_if_the_local_slice_is_contiguous() -> None:
    def program(x: Tensor) -> list[list[float]]:
        x[:, :2].contiguous().zero_()
        x[:, 1:].reshape(-1).zero_()
        x[:, :2].flatten().zero_()
        return mw.unshard_dtensor(x).tolist()

    assert on_four(program, [mw.Shard(0)]) == [torch.arange(12.0).view(4, 3).tolist()] * 4


@pytest.mark.parametrize("dim", [0, 1])
def test_contiguity_and_strides_are_the_same_on_every_rank(dim: int) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        t = x.t()
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            t.view(-1)
        return t.is_contiguous(), t.stride(), x[:, :2].is_contiguous(), x[:, 1:].stride(), t.contiguous().stride()

    assert on_four(program, [mw.Shard(dim)]) == [(False, (1, 3), False, (3, 1), (4, 1))] * 4


def test_channels_last_is_a_memory_format_of_the_whole_tensor() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = x.to(memory_format=torch.channels_last)
        z = y * 2
        return y.stride(), z.is_contiguous(memory_format=torch.channels_last), z.is_contiguous(), z.spec

    whole = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for strides, last, usual, _ in on_four(program, [mw.Shard(1)], (2, 3, 4, 5)):
        assert (strides, last, usual) == (whole.stride(), True, False)


def test_a_reshard_never_shares_memory_with_its_source() -> None:
    def program(x: Tensor) -> tuple[float, float]:
        for placements in ([mw.Shard(0)], [mw.Shard(1)], [mw.Partial()]):
            mw.reshard(x, x.mesh, placements).mul_(0)
        return x.sum().item(), x.to_local().sum().item()

    assert on_four(program, [mw.Replicate()]) == [(66.0, 66.0)] * 4


def test_random_numbers_follow_the_memory_of_the_whole_tensor() -> None:
    """Torch fills a tensor in memory order, so a transposed tensor gets its numbers in another order."""

    def draw(x: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        t, last = x.t(), x.view(2, 2, 3, 1).to(memory_format=torch.channels_last)
        drawn = [torch.rand_like(t), torch.nn.functional.dropout(t + 1, 0.5), torch.randn_like(last)]
        drawn += [t.clone().bernoulli_(0.3), torch.bernoulli(t / 12), x.clone()[:, :2].uniform_()]
        return [mw.unshard_dtensor(y) if isinstance(y, mw.DistTensor) else y for y in drawn]

    wanted = draw(torch.arange(12.0).view(4, 3))
    for placements in ([mw.Shard(0)], [mw.Shard(1)], [mw.Replicate()]):
        for found in on_four(draw, placements):
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b)


@torch.library.custom_op("meshwright_test::grow", mutates_args=())
def grow(x: Tensor) -> Tensor:
    """Return the rows of `x`, and the first row again."""
    return torch.cat([x, x[:1]])


@grow.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] + 1, *x.shape[1:])


def test_a_local_result_with_a_wrong_shape_is_an_error() -> None:
    mw.register_rule("meshwright_test.grow", "n d -> n d")  # wrong: each rank adds a row
    with pytest.raises(mw.MeshwrightError, match="its rule is wrong"):
        on_four(grow, [mw.Shard(0)])


def test_the_result_of_attention_has_the_memory_order_of_one_device() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        q = x.view(2, 8, 4, 16).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        joined = out.transpose(1, 2).flatten(2)
        return out.stride(), joined._base is not None

    one = program(torch.arange(1024.0).view(2, 8, 64))
    assert one == ((512, 16, 64, 1), True)
    assert on_four(program, [mw.Shard(2)], (2, 8, 64)) == [one] * 4
