"""RMSNorm in plain operators, forward and backward: eager time divided by that of our compiled program.

All three run in one process, in short blocks that alternate. Each figure is the best of its blocks, because other work
on the machine only adds time. `ours` is the composed function, captured, recorded and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from benchmarks._blocks import best_ms
from meshwright.comm import current_communicator
from meshwright.graph import capture, compiled, record_gradients, runner

SHAPES = [(512, 1024), (2048, 1024), (2048, 4096), (8192, 2048)]
DTYPES = [torch.float32, torch.bfloat16]
GOALS = {"composed": 2.0, "rms_norm": 1.0}
EPS = 1e-6


class Norm(nn.Module):
    """The norm of a parameter, so that both gradients are needed; `g` is the gradient of the result."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(rows, width).to(dtype))
        self.weight = nn.Parameter(torch.randn(width).to(dtype))
        self.of = of

    def forward(self, g: Tensor) -> Tensor:
        return (self.of(self.x, self.weight) * g).sum()


def composed(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm from plain operators, as models write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def own(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the geometric mean over shapes of composed eager / ours, in both dtypes."""
    shapes = SHAPES[:2] if quick else SHAPES
    rows = [mw.simulate(lambda s=s, d=d: case(*s, d, 5 if quick else 15), 1)[0] for d in DTYPES for s in shapes]
    means = {name: {d: _mean([r[name] for r in rows if r["dtype"] == d]) for d in ("f32", "bf16")} for name in GOALS}
    return {
        "name": "rmsnorm",
        "value": means["composed"],
        "goal": "composed eager / ours at least 2 in both dtypes, rms_norm / ours at least 1 (on an A100: 4, 1.14)",
        "ok": all(v >= GOALS[name] for name, found in means.items() for v in found.values()),
        "rival": {"name": "F.rms_norm / ours", "value": means["rms_norm"]},
        "details": {"threads": torch.get_num_threads(), "rows": rows},
    }


def _mean(values: list[float]) -> float:
    return round(exp(sum(map(log, values)) / len(values)), 3)


def case(rows: int, width: int, dtype: torch.dtype, blocks: int) -> dict[str, Any]:
    """Return milliseconds of a forward and a backward pass, and the ratios."""
    torch.manual_seed(0)
    by_hand, ready = Norm(rows, width, dtype, composed), Norm(rows, width, dtype, own)
    ready.load_state_dict(by_hand.state_dict())
    g = torch.randn(rows, width).to(dtype)
    calls = {"composed": eager_call(by_hand, g), "rms_norm": eager_call(ready, g), "ours": our_call(by_hand, g)}
    check_gradients(calls["composed"](), calls["ours"](), dtype)
    best = best_ms(calls, blocks)
    ratios = {name: round(best[name] / best["ours"], 3) for name in GOALS}
    ms = {f"{name}_ms": round(t, 3) for name, t in best.items()}
    return {"shape": [rows, width], "dtype": "f32" if dtype is torch.float32 else "bf16", **ratios, **ms}


def eager_call(model: Norm, g: Tensor) -> Callable[[], list[Tensor]]:
    """Return a function that computes both gradients."""
    return lambda: list(torch.autograd.grad(model(g), [model.x, model.weight]))


def our_call(model: Norm, g: Tensor) -> Callable[[], list[Tensor]]:
    """Return our compiled program that computes both gradients."""
    captured = capture(model, model, [g])
    program = record_gradients(captured, 0, 1)
    call = runner(compiled(program, current_communicator()))
    given = [model.x if i.name == "x" else model.weight if i.name == "weight" else g for i in program.inputs]

    def step() -> list[Tensor]:
        grads = call(*given)[0]["grads"]
        return [grads["x"], grads["weight"]]

    return step


def check_gradients(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    """Check that both gradients agree up to a few roundings."""
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * b.float().abs().max().item())
