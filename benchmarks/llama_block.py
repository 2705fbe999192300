"""A Llama block on one device, inference and training step: eager time divided by that of our compiled program.

The block is that of `meshwright.models`, with its norms, attention and SwiGLU. Short blocks of calls alternate in one
process; each figure is the best of its blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._blocks import best_ms
from meshwright.models import LlamaConfig
from meshwright.models._llama import Block

GOAL = 1.1
SIZES = {"small": (256, 4, 64), "large": (1024, 2, 256)}
"""Hidden size, batch, sequence."""


class Step(nn.Module):
    """A block followed by a loss."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        config = LlamaConfig.of_width(hidden, 1)
        self.block = Block(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: eager / ours, the least over sizes and both kinds of step."""
    names = ["small"] if quick else list(SIZES)
    rows = {name: mw.simulate(lambda n=name: case(*SIZES[n], 4 if quick else 12), 1)[0] for name in names}
    value = min(row[kind] for row in rows.values() for kind in ("inference", "training"))
    return {
        "name": "llama_block",
        "value": value,
        "goal": f"eager / ours at least {GOAL} in inference and in training (published on an A100: 1.36)",
        "ok": value >= GOAL,
        "details": {"threads": torch.get_num_threads(), "rows": rows},
    }


def case(hidden: int, batch: int, sequence: int, blocks: int) -> dict[str, float]:
    """Return milliseconds and ratios for one size."""
    torch.manual_seed(0)
    eager, static = Step(hidden), Step(hidden)
    static.load_state_dict(eager.state_dict())
    x = torch.randn(batch, sequence, hidden)
    found = {"inference": _inference(eager, static, x), "training": _training(eager, static, x)}
    row: dict[str, float] = {}
    for kind, (theirs, ours) in found.items():
        for _ in range(3):
            a, b = theirs(), ours()
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)
        times = best_ms({"eager": theirs, "ours": ours}, blocks)
        row[kind] = round(times["eager"] / times["ours"], 3)
        row |= {f"{kind}_{name}_ms": round(t, 3) for name, t in times.items()}
    return row


def _inference(eager: Step, static: Step, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    dist_model = mw.to_static(static, strategy=mw.Strategy(compiler="inductor"))

    def plain() -> Tensor:
        with torch.no_grad():
            return eager(x)

    return plain, lambda: dist_model(x)


def _training(eager: Step, static: Step, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    theirs, ours = copy.deepcopy(eager), copy.deepcopy(static)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (theirs, ours)]
    target = torch.zeros_like(x)

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return (out - wanted).pow(2).mean()

    def plain() -> Tensor:
        found = loss(theirs(x), target)
        found.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return found.detach()

    dist_model = mw.to_static(ours, None, loss, optimizers[1], mw.Strategy(compiler="inductor"))
    return plain, lambda: dist_model(x, target)
