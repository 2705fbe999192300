"""Attention along a sequence that is sharded over four ranks: peak memory and received bytes of each method.

A training step of one causal attention is recorded for the last rank, and run there without any other rank. The peak is
that of the recorded program. Received bytes are those of the step, gradients and loss included. The workspace of
kernels does not count.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, HEADS, CHANNELS = 4, 8, 32
NAMES = ("gather", "ring", "ulysses")


class Attention(nn.Module):
    """The mean square of the attention whose queries, keys and values are its input times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x_bshe: Tensor) -> Tensor:
        x = x_bshe.transpose(1, 2)
        q, k, v = (x * gain for gain in self.gain.unbind())
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def step(name: Any, length: int) -> dict[str, int]:
    """Return the bytes in memory at the peak of a step, and the bytes that it receives."""
    import meshwright as mw
    from meshwright.comm import PeerlessCommunicator, using_communicator
    from meshwright.graph import live_memory

    with using_communicator(PeerlessCommunicator(RANKS - 1, RANKS)) as here:
        net = Attention()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mesh = mw.ProcessMesh(range(RANKS), ["cp"])
        mw.parallelize(net, optimizer, mesh, mw.Parallelism(context=name))
        train = mw.to_static(net, None, None, optimizer)
        before = here.seen.total_received
        train(torch.ones(1, length, HEADS, CHANNELS))
        return {"peak": live_memory(train.program).peak, "received": here.seen.total_received - before}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: peak memory by gathering divided by that of each method, for the longest sequence."""
    lengths = (256, 512) if quick else (512, 1024, 2048, 4096)
    found = {length: {name: step(name, length) for name in NAMES} for length in lengths}
    last = found[lengths[-1]]
    less = {name: round(last["gather"]["peak"] / last[name]["peak"], 2) for name in NAMES[1:]}
    return {
        "name": "context",
        "value": less,
        "goal": "> 1: less at the peak than by gathering",
        "ok": all(n > 1 for n in less.values()),
        "details": {"ranks": RANKS, "heads": HEADS, "channels": CHANNELS, "bytes by length": found},
    }


if __name__ == "__main__":
    print(json.dumps(run()))
