"""Functions of local parts: the numbers and gradients of one device, in all layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
R, ROWS, COLUMNS, SUM = mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Partial()


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x) @ w


CASES = {
    "rows": ([ROWS], [R], [ROWS]),
    "columns": ([R], [R, COLUMNS], [R, COLUMNS]),
    "both": ([ROWS], [R, COLUMNS], [ROWS, COLUMNS]),
    "contracted": ([R, COLUMNS], [R, ROWS], [R, SUM]),
    "contracted twice": ([ROWS, COLUMNS], [R, ROWS], [ROWS, SUM]),
    "repeated": ([R], [R], [R]),
    "swapped": ([R, ROWS], [COLUMNS, R], [COLUMNS, ROWS]),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case: str) -> None:
    torch.manual_seed(0)
    x, w, weight = torch.randn(4, 6), torch.randn(6, 8), torch.randn(4, 8)
    x_at, w_at, out_at = CASES[case]

    def go(on_mesh: bool) -> list[Tensor]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        if on_mesh:
            a, b = mw.shard_tensor(a, MESH, x_at), mw.shard_tensor(b, MESH, w_at)
        out = mw.local_map(product, [out_at])(a, b) if on_mesh else product(a, b)
        (out * weight).square().mean().backward()
        return [mw.unshard_dtensor(t) for t in (out.detach(), a.grad, b.grad)]

    for found in mw.simulate(go, 4, True):
        torch.testing.assert_close(found, go(False))


def test_a_replicated_result_next_to_a_sharded_one_counts_once() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 3), torch.randn(3)

    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b, b.exp().sum()

    def go(on_mesh: bool) -> list[Tensor]:
        a, b = x.clone(), w.clone().requires_grad_()
        if on_mesh:
            a, b = mw.shard_tensor(a, MESH, [ROWS]), mw.shard_tensor(b, MESH, [])
        rows, total = mw.local_map(both, [[ROWS], []])(a, b) if on_mesh else both(a, b)
        (rows.square().sum() + 3 * total).backward()
        return [mw.unshard_dtensor(t) for t in (rows.detach(), total.detach(), b.grad)]

    for found in mw.simulate(go, 4, True):
        torch.testing.assert_close(found, go(False))


def test_inputs_are_resharded_as_requested() -> None:
    def go() -> tuple[Any, ...]:
        x = mw.shard_tensor(torch.arange(8.0), MESH, [R, ROWS])
        seen: list[Any] = []
        rows = mw.local_map(lambda a, n: seen.append(a) or a * n, [[ROWS]], [[ROWS], None], reshard_inputs=True)
        return mw.unshard_dtensor(rows(x, 2)).tolist(), type(seen[0]), seen[0].shape

    assert mw.simulate(go, 4) == [([0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0], Tensor, (4,))] * 4


def test_results_may_be_other_than_tensors() -> None:
    def go() -> tuple[Any, ...]:
        x = mw.shard_tensor(torch.arange(5.0), MESH, [ROWS])
        y, n = mw.local_map(lambda a: (a * 2, len(a)), [[ROWS], None], out_shapes=[(5,), None])(x)
        return mw.unshard_dtensor(y).tolist(), n

    assert mw.simulate(go, 4) == [([0.0, 2.0, 4.0, 6.0, 8.0], n) for n in (3, 3, 2, 2)]


class OwnLoss(mw.LocalLayer):
    """The mean square of a scaled batch, from sums over local rows."""

    def __init__(self) -> None:
        super().__init__([(MESH, [SUM])])
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor, count: int) -> Tensor:
        assert type(x) is Tensor
        assert not hasattr(self.scale, "spec")
        return (x * self.scale).square().sum() / count


@pytest.mark.parametrize("rows", [4, 5])
def test_a_local_layer_with_parameters_of_its_own(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 3)
    scale = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = (x * scale).square().mean()
    loss.backward()

    def go() -> tuple[float, Tensor]:
        layer = mw.shard_layer(OwnLoss(), MESH)
        out = layer(mw.shard_tensor(x, MESH, [ROWS]), x.numel())
        out.backward()
        return out.item(), mw.unshard_dtensor(layer.scale.grad)

    for value, grad in mw.simulate(go, 4):
        assert value == pytest.approx(loss.item())
        torch.testing.assert_close(grad, scale.grad)
