"""A pending sum that was reduced once stays reduced: later linear operators take the reduced value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["tp"])
X, W = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 24).view(4, 6)


def norm(h: Tensor) -> Tensor:
    """Return a root mean square norm, as models write it: `h` is read by a square and by a product."""
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def hidden(x: Tensor, w: Tensor) -> Tensor:
    """Return a product with a sharded contraction: a pending sum."""
    return mw.shard_tensor(x, MESH, [mw.Shard(1)]) @ mw.shard_tensor(w, MESH, [mw.Shard(0)])


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": norm,
    "contraction": lambda h: h.pow(2).sum() + (h @ torch.ones(6, 2)).relu().sum(),
    "both operands": lambda h: h.abs() * (h + h),
    "cast": lambda h: h.sigmoid() + h.double().sin(),
    "other dims": lambda h: h.exp() + h.sum(0, keepdim=True).cos(),
    "last operand": lambda h: h.exp() + torch.ones(6) * (2.0 * h).tanh(),
}


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("name", USES)
def test_a_sum_is_reduced_once(name: str, graded: bool) -> None:
    use = USES[name]

    def go() -> tuple[Tensor, list[str]]:
        with torch.set_grad_enabled(graded):
            h = hidden(X, W.clone().requires_grad_(graded))
            with mw.trace_comm() as trace:
                out = use(h)
        return mw.unshard_dtensor(out).detach(), [call.step for call in trace.calls]

    found, collectives = mw.simulate(go, 2)[0]
    torch.testing.assert_close(found, use(X @ W))
    assert collectives == ["AllReduce(tp)"]


def test_a_sum_that_was_reduced_once_has_the_gradient_of_one_device() -> None:
    def go() -> tuple[Tensor, Tensor, list[str]]:
        x = X.clone().requires_grad_()
        w = mw.shard_tensor(W.clone(), MESH, [mw.Shard(0)]).requires_grad_()
        with mw.trace_comm() as trace:
            norm(mw.shard_tensor(x * 1.0, MESH, [mw.Shard(1)]) @ w).cos().sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return x.grad, mw.unshard_dtensor(w.grad), [call.step for call in trace.calls]

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    norm(x @ w).cos().sum().backward()
    found_x, found_w, collectives = mw.simulate(go, 2)[0]
    torch.testing.assert_close((found_x, found_w), (x.grad, w.grad))
    assert collectives.count("AllReduce(tp)") == 1


def write_data(h: Tensor) -> None:
    h.data.mul_(2)


def write_view(h: Tensor) -> None:
    h[1:].mul_(2)


def set_data(h: Tensor) -> None:
    h.data = h.detach() * 4


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda h: h.mul_(2),
    "data": write_data,
    "view": write_view,
    "reshaped": lambda h: h.view(18).mul_(3),
    "new data": set_data,
    "set": lambda h: h.set_(h.detach() * 4),
    "local": lambda h: h.to_local().mul_(2) if isinstance(h, mw.DistTensor) else h.mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_after_the_reduction_is_seen(write: Callable[[Any], object], mode: Callable[[], Any]) -> None:
    def use(h: Tensor) -> Tensor:
        first = h.exp().sum()
        write(h)
        return first + (2.0 * h).sin()

    def go() -> Tensor:
        with mode():
            return mw.unshard_dtensor(use(hidden(X, W)))

    with mode():
        wanted = use(X @ W)
    torch.testing.assert_close(mw.simulate(go, 2)[0], wanted)


def test_a_sum_that_was_reduced_without_gradients_may_need_one_later() -> None:
    def go() -> Tensor | None:
        with torch.no_grad():
            h = hidden(X, W)
            h.exp()
        h.requires_grad_()
        (2.0 * h).sin().sum().backward()
        return None if h.grad is None else mw.unshard_dtensor(h.grad)

    h = (X @ W).requires_grad_()
    (2.0 * h).sin().sum().backward()
    torch.testing.assert_close(mw.simulate(go, 2)[0], h.grad)


def test_a_sum_reduced_without_gradients_keeps_the_gradient_of_its_history() -> None:
    def go() -> Tensor | None:
        x = X.clone().requires_grad_()
        h = hidden(x * 1.0, W)
        with torch.no_grad():
            h.exp()
        (2.0 * h).sin().sum().backward()
        return x.grad

    x = X.clone().requires_grad_()
    (2.0 * (x @ W)).sin().sum().backward()
    torch.testing.assert_close(mw.simulate(go, 2)[0], x.grad)


def test_a_view_of_a_reduced_sum_is_a_view_of_the_sum() -> None:
    def go() -> Tensor:
        with torch.no_grad():
            h = hidden(X, W)
            h.exp()
            h.contiguous().view(3, 6).add_(1.0)
            return mw.unshard_dtensor(2.0 * h)

    torch.testing.assert_close(mw.simulate(go, 2)[0], 2.0 * (X @ W + 1.0))


def test_explain_shows_such_a_call_once() -> None:
    def go() -> str:
        with torch.no_grad():
            h = hidden(X, W)
            h.exp()
            return str(mw.explain(lambda: 2.0 * h))

    text = mw.simulate(go, 2)[0]
    assert text.count("mul") == 1
    assert "no communication" in text
