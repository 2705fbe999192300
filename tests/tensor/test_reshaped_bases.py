"""Views of a tensor that is reshaped in place stay views of its memory, in their own shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import full_tensor

RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[1],
    "rows": lambda x: x[1:],
    "column": lambda x: x[:, 0],
    "diagonal": lambda x: x.diagonal(),
    "flat": lambda x: x.view(-1),
    "row of rows": lambda x: x[1:][0],
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 3), (3, 4)])
@pytest.mark.parametrize("reshape", RESHAPES)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_stays_when_its_base_is_reshaped(view: str, reshape: str, shape: tuple[int, int], ranks: int) -> None:
    def values(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = place(torch.arange(float(shape[0] * shape[1])).reshape(shape))
        held = VIEWS[view](x)
        RESHAPES[reshape](x)
        found = [full_tensor(held).clone()]
        held.mul_(3)
        found.append(full_tensor(x).clone())
        x.add_(1)
        return [*found, full_tensor(held).clone(), full_tensor(x).clone()]

    def sharded() -> list[Tensor]:
        mesh = mw.init_mesh(x=ranks)
        return values(lambda x: mw.shard_tensor(x, mesh, [mw.Shard(0)]))

    wanted = values(lambda x: x)
    for found in mw.simulate(sharded, ranks):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours.as_subclass(Tensor), theirs)


def test_the_gradient_of_a_view_of_a_base_that_is_transposed_later() -> None:
    def gradient(place: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = place(torch.arange(4.0).reshape(2, 2)).requires_grad_()
        x = leaf * 1
        row = x[0]
        x.transpose_(0, 1)
        (row * torch.tensor([1.0, 2.0])).sum().backward()
        assert leaf.grad is not None
        return full_tensor(leaf.grad)

    wanted = gradient(lambda x: x)
    for found in mw.simulate(lambda: gradient(lambda x: mw.shard_tensor(x, mw.init_mesh(x=2), [mw.Shard(0)])), 2):
        assert torch.equal(found.as_subclass(Tensor), wanted)
