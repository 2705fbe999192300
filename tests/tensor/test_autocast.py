"""Autocast: operands of several dtypes become one, on parts as on one device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.tensor import RanWholeWarning


def attended(q: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return attention as after a rotary table in float32: queries and keys in another dtype than values."""
    with torch.autocast("cpu", torch.bfloat16):
        x = F.scaled_dot_product_attention(q, q, F.linear(v, w))
        return F.linear(x, w).float().pow(2).sum()


def random_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).requires_grad_() for s in ((4, 2, 6, 8), (4, 2, 6, 8), (8, 8))]


def test_attention_on_two_dtypes_runs_on_parts_under_autocast() -> None:
    plain = random_inputs()
    expected = attended(*plain)
    expected.backward()

    def rank() -> Any:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        q, v, w = random_inputs()
        cut = [mw.Shard(0), mw.Shard(1)]
        placed = [mw.shard_tensor(x, mesh, cut).detach().requires_grad_() for x in (q, v)]
        weight = mw.shard_tensor(w, mesh, [mw.Replicate(), mw.Replicate()]).detach().requires_grad_()
        loss = attended(*placed, weight)
        loss.backward()
        grads = [mw.unshard_dtensor(x.grad) for x in (*placed, weight) if x.grad is not None]
        return loss.item(), grads

    with warnings.catch_warnings():
        warnings.simplefilter("error", RanWholeWarning)
        found = mw.simulate(rank, 4)
    for loss, grads in found:
        torch.testing.assert_close(loss, expected.item(), rtol=1e-3, atol=1e-3)
        for a, b in zip(grads, plain, strict=True):
            torch.testing.assert_close(a, b.grad, rtol=2e-2, atol=2e-2)
