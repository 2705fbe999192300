"""A gradient tensor that the program stores has memory of its own: `x.grad` is a copy of it, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

Lay = Callable[[Tensor], Tensor]
VALUE = torch.arange(1.0, 5.0)


def leaf(lay: Lay) -> Tensor:
    return lay(VALUE).requires_grad_()


def by_hook(lay: Lay, gives: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return the kept tensor after `x.grad` is written to, and the gradient after the kept tensor is written to."""
    found: list[Any] = []
    for through in (False, True):
        x, kept = leaf(lay), lay(VALUE * 5)
        y = x * 1 if through else x
        y.register_hook(lambda g, kept=kept: gives(kept, g))
        (y * 2).sum().backward()
        found += written(x, kept)
    return found


def written(x: Tensor, kept: Tensor) -> list[Any]:
    assert x.grad is not None
    first = x.grad.tolist()
    x.grad.zero_()
    after = kept.tolist()
    kept.add_(1)
    return [first, after, x.grad.tolist()]


def by_function(lay: Lay) -> Any:
    x, w, kept = leaf(lay), VALUE.clone().requires_grad_(), lay(VALUE * 5)

    class Kept(torch.autograd.Function):
        """A function whose backward pass returns a tensor that the program stores, also to a plain argument."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return kept, kept

    y: Any = Kept.apply(x, w)
    y.sum().backward()
    assert w.grad is not None
    found = w.grad.tolist(), written(x, kept)
    w.grad.zero_()
    return found, kept.tolist()


def by_module_hook(lay: Lay) -> Any:
    x, kept = leaf(lay), lay(VALUE * 5)
    net = nn.Identity()
    net.register_full_backward_hook(lambda module, ins, outs: (kept,))
    (net(x) * 2).sum().backward()
    return written(x, kept)


def by_seed(lay: Lay) -> Any:
    x, y, kept = leaf(lay), leaf(lay), lay(VALUE * 5)
    x.backward(kept)
    (y * 1).backward(kept)
    return written(x, kept), written(y, kept)


def by_two_hooks(lay: Lay) -> Any:
    x, y, kept = leaf(lay), leaf(lay), lay(VALUE * 5)
    for t in (x, y):
        (t * 1).register_hook(lambda g: kept)
        t.register_hook(lambda g: kept)
    (x * y).sum().backward()
    return written(x, kept), written(y, kept)


PROGRAMS: dict[str, Callable[[Lay], Any]] = {
    "a sum in place": lambda lay: by_hook(lay, lambda kept, g: kept.add_(g)),
    "a kept tensor": lambda lay: by_hook(lay, lambda kept, g: kept),
    "a new tensor": lambda lay: by_hook(lay, lambda kept, g: kept * 1),
    "the gradient": lambda lay: by_hook(lay, lambda kept, g: g),
    "a function": by_function,
    "a hook of a module": by_module_hook,
    "a seed": by_seed,
    "two hooks": by_two_hooks,
}
SETTINGS = {
    "Shard(0)": (2, mw.Shard(0)),
    "Replicate": (2, mw.Replicate()),
    "Partial": (2, mw.Partial()),
    "one rank": (1, mw.Shard(0)),
    "Replicate on one rank": (1, mw.Replicate()),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_stored_gradient_has_memory_of_its_own(program: str, setting: str) -> None:
    size, placement = SETTINGS[setting]
    mesh = mw.ProcessMesh(range(size), ["a"])
    wanted = PROGRAMS[program](lambda t: t.clone())
    found = mw.simulate(lambda: PROGRAMS[program](lambda t: mw.shard_tensor(t.clone(), mesh, [placement])), size)
    assert found == [wanted] * size


def test_a_tensor_returned_in_each_step_holds_one_gradient() -> None:
    def run() -> int:
        kept = mw.shard_tensor(VALUE, mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)])
        for _ in range(3):
            x = kept.detach().requires_grad_()
            x.register_hook(lambda g: kept)
            (x * 2).sum().backward()
        return len(kept.__dict__["_meshwright_aliases"][1])

    assert mw.simulate(run, 2) == [1, 1]
