"""Experts over four ranks: bytes that a rank receives in a training step, for each way to join rows and experts.

Tokens are sharded over the ranks that hold the experts. "gather" sends every expert to every rank, as is necessary
without a rule for grouped products. "sums" is an unchanged model: each rank computes the rows of its own experts, and
the sums stay pending. "travel" is `mw.dispatch_experts`, which sends rows to the ranks that hold their experts.
"places" is the same with a capacity of a quarter more than the mean, in a static program. Bytes are exact, on all
ranks, for forward and backward pass, the reductions of the loss and of the two small gradients included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, EXPERTS, CHOICES, DIM, HIDDEN = 4, 16, 2, 64, 128
WAYS = ("gather", "sums", "travel", "places")
FACTOR = 1.25


class Mixture(nn.Module):
    """A router, and experts with two matrices each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        ways = {"gather": gather, "sums": grouped, "travel": travel, "places": places}
        self.way: Callable[..., Tensor] = ways[way]
        self.gain = nn.Parameter(torch.ones(DIM))
        self.router = nn.Parameter(torch.randn(DIM, EXPERTS, generator=g))
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN, generator=g) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM, generator=g) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        weights, indices = (x @ self.router).softmax(-1).topk(CHOICES)
        return self.way(x, indices, weights, self.up, self.down).square().mean()


def products(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


def grouped(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    ids, order = indices.reshape(-1).sort()
    ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    made = products(x[order // CHOICES], ends, up, down)
    return (made[order.argsort()].unflatten(0, (-1, CHOICES)) * weights.unsqueeze(-1)).sum(1)


def gather(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    import meshwright as mw

    return grouped(x, indices, weights, *(mw.reshard(w, placements=[mw.Replicate()]) for w in (up, down)))


def travel(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    import meshwright as mw

    return mw.dispatch_experts(x, indices, weights, products, [up, down])


def places(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    import meshwright as mw

    capacity = math.ceil(FACTOR * indices.numel() / EXPERTS)
    return mw.dispatch_experts(x, indices, weights, products, [up, down], capacity=capacity)


def received(way: str, tokens: int) -> list[int]:
    """Return the bytes that each rank receives in a step."""
    import meshwright as mw
    from meshwright.comm import current_communicator

    def step() -> int:
        mesh = mw.ProcessMesh(range(RANKS), ["ep"])
        model = Mixture(way)
        for name, p in list(model.named_parameters()):
            setattr(model, name, mw.shard_tensor(p, mesh, [mw.Shard(0) if p.dim() == 3 else mw.Replicate()]))
        x = torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(1))
        x = mw.shard_tensor(x, mesh, [mw.Shard(0)])
        if way == "places":
            return _static(mw.to_static(model, None, None, torch.optim.SGD(model.parameters(), lr=0.0)), x)
        before = current_communicator().seen.total_received
        loss = model(x)
        loss.backward()
        assert loss.isfinite().item()
        assert all(p.grad is not None for p in model.parameters())
        return current_communicator().seen.total_received - before

    def _static(train: Any, x: Tensor) -> int:
        train(x)
        before = current_communicator().seen.total_received
        train(x)
        return current_communicator().seen.total_received - before

    return mw.simulate(step, RANKS)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: bytes of the other methods divided by those of travelling rows, at the busiest rank."""
    sizes = (64, 256) if quick else (64, 256, 1024, 4096)
    found = {tokens: {way: received(way, tokens) for way in WAYS} for tokens in sizes}
    busiest = {tokens: {way: max(each) for way, each in ways.items()} for tokens, ways in found.items()}
    others = [way for way in WAYS if way != "travel"]
    more = {way: {tokens: round(ways[way] / ways["travel"], 2) for tokens, ways in busiest.items()} for way in others}
    return {
        "name": "experts",
        "value": more,
        "goal": "> 1: rows that travel are fewer bytes than experts, sums, or places",
        "ok": all(n > 1 for each in more.values() for n in each.values()),
        "details": {
            "ranks": RANKS,
            "experts": EXPERTS,
            "choices": CHOICES,
            "features": DIM,
            "hidden": HIDDEN,
            "bytes by tokens": found,
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
