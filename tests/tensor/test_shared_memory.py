"""Tensors that share memory on one device share it in every layout: gradients, parameters and copies of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

LAYOUTS: list[list[Any]] = [[mw.Shard(0)], [mw.Partial()], [mw.Replicate()]]
Lay = Callable[[Tensor], Tensor]


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) / 7


def flat_gradients(lay: Lay) -> list[Any]:
    flat = lay(torch.zeros(32))
    a, b = lay(numbers(5, 4)).requires_grad_(), lay(numbers(3, 4)).requires_grad_()
    a.grad, b.grad = flat[:20].view(5, 4), flat[20:].view(3, 4)
    ((a**2).sum() + (b**2).sum()).backward()
    (a * 3).sum().backward()
    found = [flat.clone(), a.grad.clone()]
    flat.mul_(2)
    (a.sum() + b.sum()).backward()
    found += [flat.clone(), a.grad.clone(), b.grad.clone()]
    b.grad.zero_()
    return [*found, flat]


def assigned_gradient(lay: Lay) -> list[Any]:
    g, p = lay(torch.zeros(6, 4)), lay(numbers(6, 4)).requires_grad_()
    p.grad = g
    (p**2).sum().backward()
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    found = [g.clone(), p.grad.clone()]
    torch.optim.SGD([p], 0.1).step()
    g.fill_(2)
    p.sum().backward()
    return [*found, g, p.grad, p]


def plain_gradient(lay: Lay) -> list[Any]:
    g, p = torch.zeros(6, 4), lay(numbers(6, 4)).requires_grad_()
    p.grad = g
    (p**2).sum().backward()
    found = [g.clone()]
    g.zero_()
    (p * 2).sum().backward()
    assert p.grad is not None
    return [*found, g, p.grad]


def turned_gradient(lay: Lay) -> list[Any]:
    g, p = lay(torch.zeros(4, 6)), lay(numbers(6, 4)).requires_grad_()
    p.grad = g.t()
    (p**2).sum().backward()
    return [g, p.grad]


def gradient_of_a_plain_loss(lay: Lay) -> list[Any]:
    g, p = lay(torch.zeros(6, 4)), lay(numbers(6, 4)).requires_grad_()
    p.grad = g
    loss = (p**2).sum()
    loss = mw.unshard_dtensor(loss) if isinstance(loss, mw.DistTensor) else loss
    (loss * 2).backward()
    return [g]


def flat_parameters(lay: Lay) -> list[Any]:
    flat = lay(numbers(32))
    a, b = nn.Parameter(flat[:20].view(5, 4)), nn.Parameter(flat[20:].view(3, 4))
    optimizer = torch.optim.Adam([a, b], 0.1)
    for _ in range(2):
        (a.sum() + (b**2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [flat.clone(), a.detach().clone()]
    flat.mul_(2)
    return [*found, a * 1, b * 1]


def copied_views(lay: Lay) -> list[Any]:
    base = lay(torch.zeros(6, 4))
    views = {"base": base, "rows": base[:3], "column": base[:, 1], "inner": base[1:][:, 2:], "data": base.data}
    new = copy.deepcopy(views)
    new["rows"].fill_(1)
    new["column"].add_(2)
    new["inner"].mul_(3)
    new["data"][4:].sub_(5)
    return [base, *new.values(), new["rows"].is_contiguous(), new["column"].stride()]


def copied_module(lay: Lay) -> list[Any]:
    module: Any = nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        module.weight.copy_(numbers(6, 4))
    module.weight = nn.Parameter(lay(module.weight.detach()))
    module.register_buffer("cache", lay(torch.zeros(6, 4)))
    module.head, module.row = module.weight.data[:2], module.cache[3]
    new = copy.deepcopy(module)
    new.head.zero_()
    new.row.fill_(4)
    return [module.weight, module.cache, new.weight, new.cache, new.head, new.row]


def filled_expansions(lay: Lay) -> list[Any]:
    """Return results of expansions along rows and along dims that the other operand has sharded, filled afterwards."""
    found: list[Any] = []
    for like in (lay(numbers(5, 5, 5)), lay(numbers(5, 5)).t(), lay(numbers(3, 5, 5))):
        base = lay(numbers(5, 1)) * 1
        base.expand_as(like).fill_(2)
        found += [base, base.expand_as(like) * like]
    return found


def written_expansions(lay: Lay) -> list[Any]:
    """Return results of expansions of a dim of size 1, which a mesh may have sharded, with parts written afterwards."""
    found: list[Any] = []
    for writes in ("rows", "views", "twice"):
        base = lay(numbers(1, 3))
        wide = base.expand(4, 3)
        if writes == "rows":
            for i in range(4):
                wide[i] += 1
        elif writes == "views":
            wide[0].fill_(2)
            wide[0:1].add_(1)
            wide[1:].select(0, 1)[2:] = -1
        else:
            wide.data[0] = 7
            wide.unbind()[1].mul_(2)
            wide.t()[1:, 2].sub_(wide[0, 1:])
        found += [base, wide, wide[1:] * 2]
    return found


def gradient_of_a_written_expansion(lay: Lay) -> list[Any]:
    x, row = lay(numbers(1, 3)).requires_grad_(), lay(numbers(3, 1)[:, 0]).requires_grad_()
    base = x * 2
    base.expand(4, 3)[1] = row * row
    (base * lay(numbers(4, 3))).sum().backward()
    return [base, x.grad, row.grad]


PROGRAMS = [
    filled_expansions, written_expansions, gradient_of_a_written_expansion,
    flat_gradients, assigned_gradient, plain_gradient, turned_gradient, gradient_of_a_plain_loss, flat_parameters,
    copied_views, copied_module,
]  # fmt: skip


def plain(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (mw.unshard_dtensor(x.detach()) if isinstance(x, mw.DistTensor) else x.detach()).clone()


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_memory_shared_on_one_device_is_shared_on_a_mesh(program: Any, layout: list[Any], ranks: int) -> None:
    wanted = [plain(x) for x in program(lambda x: x)]

    def on_rank() -> list[Any]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        return [plain(x) for x in program(lambda x: mw.shard_tensor(x, mesh, layout))]

    for found in mw.simulate(on_rank, ranks):
        torch.testing.assert_close(found, wanted)
