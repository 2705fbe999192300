"""Pipelines: an example across two meshes under every schedule, with the marks of eager mode.

Eight ranks, meshes [[0, 1], [2, 3]] and [[4, 5], [6, 7]], matmuls in pairs. Data are sharded along axis 0, weights by
columns and by rows along axis 1, and values between the stages move across the meshes; 8 microbatches. Losses and
updated weights of static mode are compared with eager mode and one device. Placements with two chunks per stage have
two pairs for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.pipeline import KNOWN_SCHEDULES, Schedule, ScheduleError

GOAL, RANKS, MICROBATCHES, WIDTH, STEPS = 1e-5, 8, 8, 8, 2
OTHER_MEANING = ("PipeDream", "PipeDream-2BW")
DATA, COLUMNS, ROWS = [mw.Shard(0)], [mw.Replicate(), mw.Shard(1)], [mw.Replicate(), mw.Shard(0)]


class Pairs(nn.Module):
    """A pair of matmuls per chunk, with a nonlinear function between them."""

    def __init__(self, chunks: int, homes: Sequence[Any]) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.homes = homes
        self.columns, self.rows = nn.ParameterList(), nn.ParameterList()
        for n in range(chunks):
            for weights, cut in ((self.columns, COLUMNS), (self.rows, ROWS)):
                weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5)
                weights.append(mw.shard_tensor(weight, homes[n], cut) if homes else weight)

    def forward(self, x: Tensor) -> Tensor:
        for n, (columns, rows) in enumerate(zip(self.columns, self.rows, strict=True)):
            x = (self._to(n, x) @ columns).tanh() @ rows
        return x.square().mean()

    def _to(self, n: int, x: Tensor) -> Tensor:
        if not self.homes:
            return x
        x = mw.reshard(x, self.homes[n], DATA)
        return mw.pipe_split(x) if n and self.homes[n] is self.homes[n - 1] else x


def batch(step: int) -> Tensor:
    return torch.randn(4 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(way: Sequence[int], mode: str) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights after a few steps: of one device, of eager mode, or of a schedule."""
    homes = [mw.ProcessMesh([[4 * s, 4 * s + 1], [4 * s + 2, 4 * s + 3]], ["x", "y"]) for s in range(2)]
    model = Pairs(len(way), [] if mode == "one device" else [homes[s] for s in way])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    step_of: Any = model
    if mode not in ("one device", "eager"):
        pipeline = {"enable": True, "schedule_mode": mode, "accumulate_steps": MICROBATCHES}
        step_of = mw.to_static(model, optimizer=optimizer, strategy=mw.Strategy.of(pipeline=pipeline))
    for step in range(STEPS):
        loss = step_of(batch(step))
        if step_of is model:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [mw.unshard_dtensor(p.detach()) for p in model.parameters()]


def schedules() -> dict[str, Schedule]:
    """Return every known schedule for two stages and 8 microbatches that computes one device's step."""
    found: dict[str, Schedule] = {}
    for name, k in KNOWN_SCHEDULES.items():
        if name in OTHER_MEANING:
            continue
        try:
            found[name] = k.build(2, MICROBATCHES, 2)
        except ScheduleError:
            continue
    return found


def difference(found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]) -> float:
    losses = max(abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True))
    weights = (float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[1], expected[1], strict=True))
    return max(losses, *weights)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest relative difference of any loss or weight from one device's."""
    tables = schedules()
    expected = {len(t.ways[0]): trained(t.ways[0], "one device") for t in tables.values()}
    jobs = {name: (t.ways[0], name) for name, t in tables.items()} | {"eager": ((0, 1), "eager")}
    if quick:
        jobs = {name: jobs[name] for name in ("1F1B", "ZB-V", "eager")}
    rows: dict[str, float] = {}
    for name, (way, mode) in jobs.items():
        ranks = mw.simulate(trained, RANKS, way, mode)
        rows[name] = float(f"{max(difference(found, expected[len(way)]) for found in ranks):.1e}")
    value = max(rows.values())
    return {
        "name": "seed_pipeline",
        "value": value,
        "goal": f"at most {GOAL:g} relative, under every schedule",
        "ok": value <= GOAL,
        "rival": None,
        "details": {"schedules": rows},
    }
