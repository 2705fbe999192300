"""Compare a matrix product on two ranks, forward and backward, with the same product on one device.

`python -m meshwright.cli.ranks.self_check` runs one of the ranks; `meshwright doctor` starts them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from meshwright.comm import init_process, simulate
from meshwright.engine import shard_tensor, unshard_dtensor
from meshwright.layout import Placement, ProcessMesh, Replicate, Shard

RANKS = 2
LAYOUTS: tuple[tuple[Placement, Placement], ...] = ((Shard(0), Replicate()), (Shard(1), Shard(0)))
"""The layouts of x and w: rows sharded, and then the summed dim sharded."""


def check_simulated() -> str:
    """Return what is wrong on simulated ranks; "" if nothing is."""
    return next(filter(None, simulate(check_on_rank, RANKS)), "")


def check_on_rank() -> str:
    """Return, on each rank, what differs from one device; "" if nothing. Five rows on two ranks are uneven."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(5, 7, generator=generator, device="cpu"), torch.randn(7, 3, generator=generator, device="cpu"))
    expected = _step(x.clone().requires_grad_(), w.clone().requires_grad_())
    mesh = ProcessMesh(list(range(RANKS)), ["x"])
    for of_x, of_w in LAYOUTS:
        laid = shard_tensor(x, mesh, [of_x]).requires_grad_(), shard_tensor(w, mesh, [of_w]).requires_grad_()
        for name, a, b in zip(("result", "gradient of x", "gradient of w"), _step(*laid), expected, strict=True):
            if not torch.allclose(unshard_dtensor(a), b, rtol=1e-5, atol=1e-6):
                return f"the {name} of a product with x as {of_x} differs from one device"
    return ""


def _step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.relu(x @ w)
    out.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return out.detach(), x.grad, w.grad


if __name__ == "__main__":
    init_process(backend="gloo")
    sys.exit(check_on_rank() or 0)
