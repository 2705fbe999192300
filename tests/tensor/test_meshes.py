"""Tensors on a mesh without some ranks: every rank runs every line, and gradients reach all ranks of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.tensor.conversion.stage_order import StageOrder
from meshwright.tensor.core.absent_tensor import Absent

FIRST, SECOND = mw.ProcessMesh([0, 1], ["tp"]), mw.ProcessMesh([2, 3], ["tp"])


def program(x: Tensor, a: Tensor, b: Tensor, move: Any) -> tuple[Tensor, float]:
    """Return the results of two stages, with dropout in both, a branch on a value of the second, and a skip edge."""
    h = F.dropout(F.gelu(x @ a), 0.25)
    h, skip = move(h), move(x)
    y = (h @ b) + skip
    if y.abs().mean().item() > 0:
        y = F.dropout(y, 0.5)
    loss = y.square().mean()
    loss.backward()
    return loss, loss.item()


def test_two_stages_give_the_numbers_of_one_device() -> None:
    torch.manual_seed(0)
    x, a, b = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5, 4)

    def on_rank() -> tuple[float, Tensor, Tensor]:
        torch.manual_seed(1)
        wa = mw.shard_tensor(a.clone().requires_grad_(), FIRST, [mw.Shard(1)])
        wb = mw.shard_tensor(b.clone().requires_grad_(), SECOND, [mw.Shard(0)])
        xs = mw.shard_tensor(x, FIRST, [])
        _, value = program(xs, wa, wb, lambda t: mw.reshard(t, SECOND, []))
        return value, mw.unshard_dtensor(wa.grad), mw.unshard_dtensor(wb.grad)

    torch.manual_seed(1)
    pa, pb = a.clone().requires_grad_(), b.clone().requires_grad_()
    _, wanted = program(x, pa, pb, lambda t: t)
    for value, ga, gb in mw.simulate(on_rank, 4):
        assert abs(value - wanted) < 1e-6
        torch.testing.assert_close(ga, pa.grad)
        torch.testing.assert_close(gb, pb.grad)


def test_optimizers_update_parameters_on_their_ranks() -> None:
    def on_rank() -> Tensor:
        w = mw.shard_tensor(torch.nn.Parameter(torch.ones(4, 4)), SECOND, [mw.Shard(0)])
        optimizer = torch.optim.AdamW([w], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (w * mw.shard_tensor(torch.arange(16.0).view(4, 4), SECOND, [])).sum().backward()
            optimizer.step()
        return mw.unshard_dtensor(w)

    w = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (w * torch.arange(16.0).view(4, 4)).sum().backward()
        optimizer.step()
    for found in mw.simulate(on_rank, 4):
        torch.testing.assert_close(found, w.detach())


def test_a_plain_tensor_that_is_returned_unchanged_stays_plain() -> None:
    """Also outside the mesh: `to` returns its operand, and writes nothing to it."""

    def on_rank() -> bool:
        out = mw.shard_tensor(torch.ones(4, 4), SECOND, [])
        out.requires_grad_()
        y = torch.ones(4)
        y.to(out)
        return y.requires_grad

    assert not any(mw.simulate(on_rank, 4))


def test_a_plain_parameter_gets_zeros_outside_the_mesh_of_its_operand() -> None:
    def on_rank() -> Any:
        w = torch.nn.Parameter(torch.ones(4, 4))
        (w * mw.shard_tensor(torch.arange(16.0).view(4, 4), SECOND, [])).sum().backward()
        return w.grad

    outside, inside = torch.zeros(4, 4), torch.arange(16.0).view(4, 4)
    for found, wanted in zip(mw.simulate(on_rank, 4), (outside, outside, inside, inside), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), wanted)


@torch.library.custom_op("meshtests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Return an operator's result whose shape the meta device cannot predict."""
    return x * 2


doubled.register_autograd(lambda ctx, grad: grad * 2)


def groups(x: Tensor) -> Tensor:
    """Return a grouped product: torch's meta kernel needs bfloat16, and its kernels do not."""
    ends = torch.tensor([1, 4], dtype=torch.int32)
    return torch._grouped_mm(x.flatten(0, 1), x.new_ones(2, 8, 8), offs=ends)


@pytest.mark.parametrize("call", [doubled, groups, lambda x: x[..., [-2, 0]]], ids=["own", "_grouped_mm", "list"])
def test_ranks_outside_know_the_result_of_a_call(call: Callable[[Tensor], Tensor]) -> None:
    given = torch.randn(4, 1, 8).log_softmax(-1)

    def on_rank() -> Any:
        x = mw.shard_tensor(given, SECOND, []).requires_grad_()
        out = mw.reshard(call(x), FIRST, [])
        out.square().sum().backward()
        grad: Any = x.grad
        return mw.unshard_dtensor(out.detach()), mw.unshard_dtensor(grad)

    x = given.clone().requires_grad_()
    wanted = call(x)
    wanted.square().sum().backward()
    for out, grad in mw.simulate(on_rank, 4):
        torch.testing.assert_close(out, wanted.detach())
        torch.testing.assert_close(grad, x.grad)


SIZED = {
    "ones": lambda x, n: torch.ones(n, 3),
    "zeros": lambda x, n: torch.zeros((n, 3)),
    "arange": lambda x, n: torch.arange(n),
    "eye": lambda x, n: torch.eye(n),
    "full": lambda x, n: torch.full((n,), 1.0),
    "linspace": lambda x, n: torch.linspace(0, 1, n),
    "plain expand": lambda x, n: torch.ones(3).expand(n, 3),
    "plain narrow": lambda x, n: torch.ones(5).narrow(0, 0, n),
    "plain roll": lambda x, n: torch.arange(6).roll(n),
    "plain topk": lambda x, n: torch.arange(6.0).topk(n)[0],
    "view": lambda x, n: x.view(n, 5),
    "narrow": lambda x, n: x.narrow(0, 0, n),
    "topk": lambda x, n: x.topk(n - 1, 0)[0],
    "select": lambda x, n: x.select(0, n),
    "slice": lambda x, n: x[:n],
    "multinomial": lambda x, n: torch.multinomial(torch.ones(n), n).sort()[0],
}
"""Calls that take a size or a place from a tensor."""


@pytest.mark.parametrize("call", SIZED.values(), ids=SIZED)
def test_ranks_outside_get_sizes_from_the_stage(call: Callable[[Tensor, Any], Tensor]) -> None:
    def on_rank() -> Tensor:
        order = StageOrder([FIRST, SECOND])
        order.come_to(FIRST)
        x, n = mw.shard_tensor(torch.arange(20.0).view(5, 4), FIRST, []), mw.shard_tensor(torch.tensor(4), FIRST, [])
        return mw.unshard_dtensor(call(x, n))

    wanted = call(torch.arange(20.0).view(5, 4), 4)
    for found in mw.simulate(on_rank, 4):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_ranks_outside_hold_no_value_of_a_scalar(dtype: torch.dtype) -> None:
    def on_rank() -> Tensor:
        return mw.shard_tensor(torch.ones((), dtype=dtype), FIRST, []).to_local()

    here, away = mw.simulate(on_rank, 4)[::2]
    assert here == 1
    assert away.shape == ()
    assert bool(away.isnan()) or int(away) == torch.iinfo(torch.int64).min


def test_gradients_are_absent_outside_their_mesh() -> None:
    """The gradients of a hook and of a leaf have a spec on the mesh; ranks outside hold no part of them."""

    def on_rank() -> list[Any]:
        x = mw.shard_tensor(torch.arange(8.0), SECOND, [mw.Shard(0)]).requires_grad_()
        hooked: list[Any] = []
        y = x * 2
        y.register_hook(hooked.append)
        (y * y).sum().backward()
        assert x.grad is not None
        found = [*hooked, x.grad]
        assert all(isinstance(g, Absent) is (mw.get_rank() not in SECOND) for g in found)
        return [(g.spec, tuple(g.shape), mw.unshard_dtensor(g)) for g in found]

    for found in mw.simulate(on_rank, 4):
        for (spec, shape, value), times in zip(found, (4.0, 8.0), strict=True):
            assert spec.mesh is SECOND
            assert shape == (8,)
            torch.testing.assert_close(value, times * torch.arange(8.0))


def test_ranks_outside_get_value_dependent_sizes_in_a_pipeline() -> None:
    values = torch.tensor([3.0, 0.0, 4.0, 0.0, 5.0])

    def on_rank() -> Any:
        order = StageOrder([FIRST, SECOND])
        x = mw.shard_tensor(values, SECOND, [mw.Shard(0)])
        found = [torch.nonzero(x), torch.unique(input=x)]
        assert all(isinstance(f, mw.DistTensor) and f.spec.mesh is SECOND for f in found)
        assert order.has([FIRST, SECOND])
        return [(tuple(f.shape), mw.unshard_dtensor(f)) for f in found]

    wanted = [((3, 1), torch.nonzero(values)), ((4,), torch.unique(values))]
    for found in mw.simulate(on_rank, 4):
        torch.testing.assert_close(found, wanted)


def test_values_sent_to_a_stage_are_cached_until_the_layer_ends() -> None:
    """A layer inside a layer ends nothing."""
    order, x = StageOrder([FIRST, SECOND]), torch.ones(2)
    sent: list[Tensor] = []

    def send() -> Tensor:
        sent.append(x.clone())
        return sent[-1]

    order.begin()
    order.begin()
    first = order.once(x, SECOND, send)
    order.end()
    assert order.once(x, SECOND, send) is first
    order.end()
    assert order.once(x, SECOND, send) is not order.once(x, SECOND, send)
    assert len(sent) == 3
