"""What was switched between two calls of a static model is seen: hooks too, and other hooks in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

Step = Callable[[Tensor, Tensor], Tensor]


def story(static: bool) -> Iterator[float]:
    """The losses of steps between which hooks come and go."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist_model = mw.to_static(model, None, F.mse_loss, optimizer) if static else None
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    weight = model[0].weight

    def step() -> float:
        if dist_model is not None:
            return dist_model(x, y).item()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    yield step()
    for factor in (10, 0.1):
        handle = weight.register_hook(lambda grad, factor=factor: grad * factor)
        yield step()
        handle.remove()
    for factor in (2, 3):
        handle = model[0].register_forward_hook(lambda _, given, out, factor=factor: out * factor)
        yield step()
        handle.remove()
    yield step()


def test_hooks_that_come_and_go_count() -> None:
    static, eager = (mw.simulate(lambda s=s: list(story(s)), 1)[0] for s in (True, False))
    assert static == pytest.approx(eager, rel=1e-6)
