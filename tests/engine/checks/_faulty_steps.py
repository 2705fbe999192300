"""Steps on two ranks, each with a fault on rank 1."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import CommCall, ProcessCommunicator
from meshwright.errors import MeshwrightError

HIDDEN = 8
WAYS = ("data", "state", "assigned", "detached", "view", "out")
"""Ways to write to a parameter, or to a state."""


class Run:
    """A small model that is trained on two ranks, step by step."""

    def __init__(self, cut: mw.Placement, static: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.mesh = mw.init_mesh(dp=2)
        self.net = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        for layer in (self.net[0], self.net[2]):
            for name, p in [*layer.named_parameters()]:
                setattr(layer, name, mw.shard_tensor(p, self.mesh, [cut]))
        torch.manual_seed(0)
        self.data = mw.shard_tensor(torch.randn(4, HIDDEN), self.mesh, [mw.Shard(0)])
        self.optimizer = torch.optim.AdamW(self.net.named_parameters(), lr=0.01)
        self.static = mw.to_static(self.net, None, nn.functional.mse_loss, self.optimizer) if static else None

    def step(self, damage: Callable[[], object] = lambda: None, zero: bool = True) -> float:
        """Return the loss of one step; `damage` happens before the update. Without `zero`, gradients are kept."""
        if self.static is not None:
            damage()
            return float(self.static(self.data, self.data))
        if zero:
            self.optimizer.zero_grad()
        loss = ((self.net(self.data) - self.data) ** 2).mean()
        loss.backward()
        grads = [p.grad for p in self.net.parameters()]
        assert all(g is not None for g in grads)
        damage()
        self.optimizer.step()
        return loss.item()

    def first(self) -> mw.DistTensor:
        """Return the first parameter."""
        found = next(self.net.parameters())
        assert isinstance(found, mw.DistTensor)
        return found


def is_other() -> bool:
    return mw.get_rank() == 1


def local(x: Tensor | None) -> Tensor:
    assert isinstance(x, mw.DistTensor)
    return x.to_local().detach()


def put_nan(x: Tensor | None) -> None:
    if is_other():
        local(x)[0, 0] = float("nan")


def flip(x: Tensor) -> None:
    if is_other():
        local(x).view(torch.int32)[0, 0] ^= 1


def bad_gradient(cut: mw.Placement, static: bool) -> None:
    run = Run(cut, static)
    run.step()
    run.step(lambda: put_nan(run.first() if static else run.first().grad))


def left_out() -> None:
    mw.check_steps("skip")
    run = Run(mw.Shard(0))
    run.step()
    before = [mw.unshard_dtensor(p).clone() for p in run.net.parameters()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.step(lambda: put_nan(run.first().grad))
    assert any("is skipped" in str(w.message) for w in told)
    assert all(torch.equal(a, mw.unshard_dtensor(b)) for a, b in zip(before, run.net.parameters(), strict=True))
    run.step()
    assert not any(torch.equal(a, mw.unshard_dtensor(b)) for a, b in zip(before, run.net.parameters(), strict=True))


def flipped(static: bool) -> None:
    mw.check_steps(replicas=1)
    run = Run(mw.Replicate(), static)
    run.step()
    flip(run.first())
    run.step()


def other_start() -> None:
    run = Run(mw.Replicate())
    flip(run.first())
    run.step()


def other_whole(static: bool) -> None:
    Run(mw.Shard(0), static, seed=mw.get_rank()).step()


def written_over() -> None:
    """Start with other values in each way that a program may overwrite them: by load, operator, data, part."""
    for way in ("load", "copy", "data", "part"):
        run = Run(mw.Shard(0), seed=mw.get_rank())
        right = Run(mw.Shard(0)).net
        if way == "load":
            run.net.load_state_dict(right.state_dict())
        for p, q in zip(run.net.parameters(), right.parameters(), strict=True):
            with torch.no_grad():
                if way == "copy":
                    p.copy_(q)
                elif way == "data":
                    p.data = q.detach().clone()
                elif way == "part":
                    local(p).copy_(local(q))
        run.step()


def not_zeroed(cut: mw.Placement) -> None:
    run = Run(cut)
    run.step()
    run.step(zero=not is_other())


def frozen() -> None:
    run = Run(mw.Shard(0))
    run.step()
    run.first().requires_grad_(not is_other())
    run.optimizer.zero_grad()
    ((run.net(run.data) - run.data) ** 2).mean().backward()
    run.optimizer.step()


def written_alone(cut: mw.Placement, static: bool, way: str) -> None:
    """Write to a parameter or a state on rank 1 alone; the next update finds it, not the next comparison."""
    run = Run(cut, static)
    for _ in range(2):
        run.step()
    p, state = run.first(), run.optimizer.state[run.first()]
    if is_other():
        with torch.no_grad():
            if way == "data":
                p.data.mul_(2)
            elif way == "assigned":
                p.data = p.data * 2
            elif way == "detached":
                p.detach().add_(1)
            elif way == "view":
                p.data.view(-1).add_(1)
            elif way == "out":
                torch.mul(p.data, 2, out=p.data)
            elif way == "state":
                state["exp_avg"].zero_()
    run.step()


def replayed() -> None:
    mw.check_steps(replay=1)
    run = Run(mw.Replicate(), static=True)
    run.step()
    moved, left = ProcessCommunicator._moved, [1]

    def damaged(self: ProcessCommunicator, call: CommCall, sends: Any, out: Any = ()) -> Any:
        found = moved(self, call, sends, out)
        if call.kind == "all_reduce" and is_other() and found[0].numel() > HIDDEN and left[0]:
            left[0] = 0
            found[0].view(-1).view(torch.int32)[0] ^= 1 << 12
        return found

    ProcessCommunicator._moved = damaged
    try:
        run.step()
    finally:
        ProcessCommunicator._moved = moved


def clean() -> None:
    mw.check_steps(replicas=2, replay=3)
    for static in (False, True):
        for cut in (mw.Replicate(), mw.Shard(0)):
            run = Run(cut, static)
            losses = [run.step() for _ in range(5)]
            assert losses == sorted(losses, reverse=True)


CASES: dict[str, Callable[[], object]] = {
    "clean": clean,
    "bad gradient, whole": lambda: bad_gradient(mw.Replicate(), static=False),
    "bad gradient, cut": lambda: bad_gradient(mw.Shard(0), static=False),
    "bad numbers, static": lambda: bad_gradient(mw.Shard(0), static=True),
    "left out": left_out,
    "flipped": lambda: flipped(static=False),
    "flipped, static": lambda: flipped(static=True),
    "other start": other_start,
    "other whole": lambda: other_whole(static=False),
    "other whole, static": lambda: other_whole(static=True),
    "written over": written_over,
    "frozen": frozen,
    "not zeroed, whole": lambda: not_zeroed(mw.Replicate()),
    "not zeroed, cut": lambda: not_zeroed(mw.Shard(0)),
    "replayed": replayed,
    **{
        f"written by {way}, {'cut' if cut.is_shard() else 'whole'}, {'static' if static else 'eager'}": partial(
            written_alone, cut, static, way
        )
        for static in (False, True)
        for cut in (mw.Replicate(), mw.Shard(0))
        for way in WAYS[: 2 if static else None]
    },
}


def told(case: Callable[[], object]) -> str:
    mw.check_steps()
    try:
        case()
    except MeshwrightError as error:
        return str(error)
    return ""


def results() -> dict[str, str]:
    """Return the error of each case; an empty text for a case without an error."""
    found = {name: told(case) for name, case in CASES.items()}
    mw.check_steps()
    return found
