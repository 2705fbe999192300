"""`python _identity_program.py FOLDER`: one of two ranks; rank 1 does something else in each case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import DisagreementError, ProcessCommunicator
from meshwright.tensor import DistTensor

Case = Callable[[bool], object]


def laid(*placements: mw.Placement, seed: int = 0) -> DistTensor:
    """Return a distributed 4 × 4 tensor of given numbers."""
    x = torch.arange(16.0).reshape(4, 4) + seed
    return mw.shard_tensor(x, mw.init_mesh(tp=2), list(placements))


def whole(x: Tensor) -> Tensor:
    """Return the whole value, by one collective."""
    return mw.unshard_dtensor(x)


def other_order(other: bool) -> None:
    a, b = laid(mw.Shard(0)), laid(mw.Shard(0))
    for x in (b, a) if other else (a, b):
        whole(x)


def other_operator(other: bool) -> None:
    x = laid(mw.Shard(0))
    whole(x.exp() if other else x.sin())


def other_number(other: bool) -> None:
    whole(laid(mw.Shard(0)) * (3.0 if other else 2.0))


def other_operand(other: bool) -> None:
    a, b, x = laid(mw.Shard(1)), laid(mw.Shard(1)), laid(mw.Replicate())
    whole(torch.nn.functional.linear(x, b if other else a) * 2)


def other_gradient(other: bool) -> None:
    w, x = laid(mw.Shard(1)).requires_grad_(), laid(mw.Replicate()).requires_grad_()
    y = torch.nn.functional.linear(x, w).tanh()
    (y.abs() if other else y.square()).sum().backward()
    assert x.grad is not None


def other_parameter(other: bool) -> None:
    """A rank uses another weight of a unit, whose gradient has the same shape."""
    model: Any = torch.nn.Bilinear(4, 4, 1)
    model.weight, model.bias = (torch.nn.Parameter(torch.eye(4)) for _ in range(2))
    mw.shard_layer(model, mw.init_mesh(tp=2))
    mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), mw.ShardingStage3("tp", model, 1))
    product = mw.local_map(lambda x, a, b: x @ (b if other else a), [[mw.Shard(0)]])
    model.forward = lambda x: product(x, model.weight, model.bias)
    model(laid(mw.Shard(0))).sum().backward()
    assert model.weight.grad is not None or model.bias.grad is not None


def other_step(other: bool) -> None:
    w = torch.nn.Parameter(laid(mw.Shard(0)))
    optimizer = torch.optim.SGD([w], lr=0.2 if other else 0.1)
    w.sum().backward()
    optimizer.step()
    whole(w)


def one_step_less(other: bool) -> None:
    w = torch.nn.Parameter(laid(mw.Shard(0)))
    optimizer = torch.optim.Adam([w], lr=0.1)
    w.sum().backward()
    if not other:
        optimizer.step()
    whole(w)


def other_seed(other: bool) -> None:
    torch.manual_seed(int(other))
    whole(torch.nn.functional.dropout(laid(mw.Shard(0)), 0.5))


def other_random_state(other: bool) -> None:
    if other:
        torch.rand(3)
    whole(torch.rand_like(laid(mw.Shard(0))))


def other_norm(other: bool) -> None:
    step_after(lambda w: mw.clip_grad_norm_([w], 0.5 if other else 1.0))


def other_norm_of_torch(other: bool) -> None:
    step_after(lambda w: torch.nn.utils.clip_grad_norm_([w], 0.5 if other else 1.0))


def other_hook(other: bool) -> None:
    step_after(lambda w: None, (lambda grad: grad * 2) if other else None)


def step_after(change: Callable[[Tensor], object], hook: Callable[[Tensor], Tensor | None] | None = None) -> None:
    """Make a step with gradients that `change` or `hook` changes, and a collective for the parameter."""
    w = torch.nn.Parameter(laid(mw.Replicate()))
    if hook is not None:
        w.register_hook(hook)
    (w * laid(mw.Shard(0))).sum().backward()
    change(w)
    torch.optim.SGD([w], lr=0.1).step()
    whole(w * laid(mw.Shard(0)))


def other_batch(other: bool) -> None:
    batches = [torch.ones(4, 4), torch.full((4, 4), 3.0 if other else 2.0)]
    for x in mw.shard_dataloader(batches, mw.init_mesh(tp=2), "tp"):
        whole(x)


def other_steps_of_training(other: bool) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mw.train(model, optimizer, [], mw.Training(2 if other else 1, clip=1.0, show=False))


CASES: tuple[Case, ...] = (
    *(other_order, other_operator, other_number, other_operand, other_gradient, other_parameter, other_step),
    *(one_step_less, other_seed, other_random_state, other_norm, other_norm_of_torch, other_hook, other_batch),
)
ONLY_DIFFERENT: tuple[Case, ...] = (other_steps_of_training,)
"""Cases that are not run as they are on equal ranks."""


def alike(rank: int) -> None:
    """Do what ranks may do: start with other values that are overwritten, read parts, compute without collectives.

    The values are overwritten in each way: by an operator, through an alias, through the local part, as `data`.
    """
    x, y, z, w = (laid(mw.Shard(0), seed=rank) for _ in range(4))
    x.copy_(torch.ones(4, 4))
    y.detach().zero_()
    z.to_local().fill_(1.0)
    w.data = laid(mw.Shard(0))
    for each in (x, y, z, w):
        whole(each)
    step_after(lambda w: None, (lambda grad: None) if rank == 1 else None)
    x = laid(mw.Shard(0))
    if rank == 1:
        y = (x * 2).sin()
        x.to_local().sum().item()
        y.detach().add_(1)
        assert x.shape == (4, 4)
    whole(x + 1)
    mw.init_process().barrier((0, 1))


def error_of(case: Case, ranks: ProcessCommunicator) -> str:
    """Return the error of a case, or ""."""
    torch.manual_seed(0)
    try:
        case(ranks.rank == 1)
    except DisagreementError as error:
        return str(error)
    return ""


def main(folder: str) -> None:
    """Write the error of each case, after the cases as they are on equal ranks."""
    ranks = mw.init_process()
    assert isinstance(ranks, ProcessCommunicator)
    torch.manual_seed(0)
    for case in CASES:
        case(False)
    alike(ranks.rank)
    found = {case.__name__: error_of(case, ranks) for case in CASES + ONLY_DIFFERENT}
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
