"""A write between forward and backward has the effect of one device: torch's error, or the new values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

LAYOUTS: list[list[Any]] = [[mw.Shard(0)], [mw.Shard(1)], [mw.Partial()], [mw.Replicate()]]

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.t()": lambda x, w: x @ w.t(),
    "linear": nn.functional.linear,
    "x[:4] * w": lambda x, w: x[:4] * w,
    "sin(w) * x": lambda x, w: x[:4] * w.sin(),
    "x[:4] + w": lambda x, w: x[:4] + w,
    "a part of w": lambda x, w: x[:2, :4] * w[1:3],
    "logsumexp": lambda x, w: torch.logsumexp(x[:4] * w, 0),
    "cdist, without a rule": lambda x, w: torch.cdist(x, w, p=1.0),
}

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda w: None,
    "w.data.zero_()": lambda w: w.data.zero_(),
    "w.data.clamp_": lambda w: w.data.clamp_(-0.1, 0.1),
    "w.data[1:3, 0] = 9": lambda w: w.data[1:3, 0].fill_(9.0),
    "w.t().data.mul_(2)": lambda w: w.t().data.mul_(2),
    "w.data = new": lambda w: setattr(w, "data", w.data * 2),
    "w.data = new, and a write": lambda w: (setattr(w, "data", w.data * 2), w.data.add_(1)),
    "two writes to w.data": lambda w: (w.data.sub_(1), w.data.mul_(3)),
    "w.mul_(2)": lambda w: w.mul_(2),
    "w[1].zero_()": lambda w: w[1].zero_(),
    "w.detach().zero_()": lambda w: w.detach().zero_(),
}


def outcome(x: Tensor, w: Tensor, call: str, write: str) -> Any:
    """Return the gradients of the call after the write, or "raises"."""
    total = CALLS[call](x, w).square().sum()
    with torch.no_grad():
        WRITES[write](w)
    try:
        total.backward()
    except RuntimeError as error:
        return "raises" if "inplace" in str(error) else str(error)
    assert x.grad is not None
    return [x.grad, *([w.grad] if w.requires_grad else [])]


def numbers(*shape: int) -> Tensor:
    return (torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * 7) % 5 - 2.25


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_backward_pass_counts_as_on_one_device(write: str, wants: bool, layout: list[Any]) -> None:
    for call in CALLS:
        wanted = outcome(numbers(6, 4).requires_grad_(), numbers(4, 4).requires_grad_(wants), call, write)

        def on_rank(call: str = call) -> Any:
            mesh = mw.ProcessMesh([0, 1], ["a"])
            x = mw.shard_tensor(numbers(6, 4), mesh, [mw.Shard(0)]).requires_grad_()
            w = mw.shard_tensor(numbers(4, 4), mesh, layout).requires_grad_(wants)
            found = outcome(x, w, call, write)
            return found if isinstance(found, str) else [mw.unshard_dtensor(g) for g in found]

        for found in mw.simulate(on_rank, 2):
            if isinstance(wanted, str) or isinstance(found, str):
                assert found == wanted, call
            else:
                torch.testing.assert_close(found, wanted, msg=lambda m, c=call: f"{c}: {m}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_write_to_data_reaches_the_backward_pass_with_empty_parts(layout: list[Any]) -> None:
    def gradients(lay: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for call in (torch.matmul, lambda x, w: x * w.t()[:5, :1], lambda x, w: nn.functional.linear(x, w.t())):
            x, w = lay(numbers(5, 6)), lay(numbers(6, 5)).requires_grad_()
            total = call(x, w).square().sum()
            x.data.mul_(2)
            total.backward()
            assert w.grad is not None
            found.append(w.grad)
        return found

    def on_rank() -> list[Tensor]:
        mesh = mw.ProcessMesh(range(4), ["a"])
        return [mw.unshard_dtensor(g) for g in gradients(lambda t: mw.shard_tensor(t, mesh, layout))]

    for found in mw.simulate(on_rank, 4):
        torch.testing.assert_close(found, gradients(lambda t: t))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w[1:],
    "rows of rows": lambda w: w[1:][1:],
    "inner view": lambda w: w[1:, :1],
    "transposed, cut": lambda w: w.t()[:, 1:],
    "flat": lambda w: w.view(-1)[2:],
    "overlapping": lambda w: w.unfold(0, 2, 1),
}
USES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda v: 0.0,
    "linear": lambda v: (v * 1).sum(),
    "saved": lambda v: (v.exp() * v).sum(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_was_saved_and_is_used_again_counts_as_on_one_device(view: str) -> None:
    value = numbers(4, 2)

    def gradient(write: str, use: str, mark: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> Any:
        w = mark(value.clone()).requires_grad_()
        v = VIEWS[view](w)
        total = (v * v).sum()
        with torch.no_grad():
            WRITES[write](w)
        total = total + USES[use](v)
        try:
            total.backward()
        except RuntimeError as error:
            return "raises" if "inplace" in str(error) else str(error)
        assert w.grad is not None
        return whole(w.grad).round(decimals=4).tolist()

    cases = [(write, use) for write in WRITES for use in USES]
    want = [gradient(*case, lambda t: t, lambda t: t) for case in cases]

    def on_rank() -> list[Any]:
        mesh = mw.ProcessMesh(range(2), ["x"])
        return [gradient(*c, lambda t: mw.shard_tensor(t, mesh, [mw.Shard(0)]), mw.unshard_dtensor) for c in cases]

    for found in mw.simulate(on_rank, 2):
        for case, mine, goal in zip(cases, found, want, strict=True):
            assert str(mine) == str(goal), case
