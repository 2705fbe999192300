"""Leaves that are views of a buffer, and views of leaves that change: as on one device, or a MeshwrightError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

Put = Callable[[Tensor, mw.Placement], Tensor]
FLAT = torch.arange(12.0) / 7


def written_buffer(put: Put) -> list[Any]:
    flat = put(FLAT, mw.Shard(0))
    p = flat.view(-1, 3).requires_grad_()
    with torch.no_grad():
        flat.add_(1)
    (p * 2).square().sum().backward()
    flat.mul_(2)
    return [p.grad, p.detach(), flat, p.is_leaf]


def trained_buffer(put: Put) -> list[Any]:
    flat = put(FLAT, mw.Shard(0))
    p, q = flat[:6].view(2, 3).requires_grad_(), flat[6:].view(3, 2).requires_grad_()
    optimizer = torch.optim.SGD([p, q], 0.1, momentum=0.9)
    for _ in range(3):
        (p @ q).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            flat.mul_(0.5)
    return [p.detach(), q.detach(), flat]


def reshaped_base(put: Put) -> list[Any]:
    w = put(FLAT[:5].view(5, 1), mw.Shard(0)).requires_grad_()
    v = w.unfold(0, 2, 2)
    with torch.no_grad():
        w.squeeze_()
    return [v.detach(), w.detach(), v.requires_grad]


PROGRAMS = [written_buffer, trained_buffer, reshaped_base]


def plain(x: Any) -> Any:
    return mw.unshard_dtensor(x.detach()).clone() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_leaf_on_a_buffer_is_the_same_as_on_one_device(program: Callable[[Put], list[Any]], ranks: int) -> None:
    wanted = [plain(x) for x in program(lambda x, _: x.clone())]
    mesh = mw.ProcessMesh(range(ranks), ["x"])

    def on_rank() -> list[Any]:
        return [plain(x) for x in program(lambda x, place: mw.shard_tensor(x, mesh, [place]))]

    for found in mw.simulate(on_rank, ranks):
        torch.testing.assert_close(found, wanted)


def test_the_error_of_a_second_pass_through_a_reread_view_has_a_remedy() -> None:
    mesh = mw.ProcessMesh(range(2), ["x"])

    def on_rank() -> None:
        for keep in (False, True):
            x = mw.shard_tensor(torch.ones(4, 6), mesh, [mw.Partial()])
            p = nn.Parameter(x)
            y = p.expand_as(x)
            x[-2:] += 1
            y.square().sum().backward(retain_graph=keep)
            if keep:
                y.sin().sum().backward()
                assert p.grad is not None
                value = mw.unshard_dtensor(x)
                torch.testing.assert_close(mw.unshard_dtensor(p.grad), 2 * value + value.cos())
            else:
                with pytest.raises(mw.OperationError, match=r"fix: .*retain_graph=True"):
                    y.sin().sum().backward()

    mw.simulate(on_rank, 2)


def test_the_error_of_a_swap_of_a_view_has_a_remedy() -> None:
    mesh = mw.ProcessMesh(range(3), ["x"])

    def on_rank() -> None:
        x = mw.shard_tensor(torch.arange(6.0), mesh, [mw.Shard(0)])
        view = x.view(2, 3)
        with pytest.raises(mw.OperationError, match=r"view\.clone|x\.clone\(\)"):
            torch.utils.swap_tensors(view, view * 2)

    mw.simulate(on_rank, 3)
