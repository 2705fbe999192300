"""Search: faults in the quality of its plans.

Small models on clusters: the chosen shardings against every combination of choices. Published runs: for each group
that differs in the plan only, the search's own plan against the authors' best one, both predicted. Numbers: models
without marks on simulated ranks against one device.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cost import cluster_of
from meshwright.graph import capture
from meshwright.search import Prices, SearchError, best_shardings, choose, least_by_enumeration, simulate_step

from ._published import Run, runs
from ._static_models import SUBJECTS

CLUSTERS = ("V100", "A100", "H100", "cpu core")
CASES = 240
STEPS = 3
CLOSE = 1e-4


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of cases worse than the best, than the authors', or with other numbers."""
    warnings.simplefilter("ignore")
    small = [name for name in range(24 if quick else CASES) if not is_best(name)]
    groups = [found for own in grouped() if (found := beside_authors(own)) is not None]
    slower = {name: ratio for name, ratio in groups if ratio > 1 + CLOSE}
    numbers = {
        f"{name} on {n}": apart(name, n) for name in SUBJECTS if name != "cnn" for n in ((4,) if quick else (4, 8))
    }
    wrong = {name: x for name, x in numbers.items() if x > CLOSE}
    return {
        "name": "plan_quality",
        "value": len(small) + len(slower) + len(wrong),
        "goal": f"none of {CASES} small searches above the best, of {len(groups)} published groups slower than the"
        f" authors' best, of {len(numbers)} chosen plans off one device",
        "ok": not (small or slower or wrong),
        "details": {
            "small": small,
            "seconds beside the authors' best": {name: round(ratio, 3) for name, ratio in groups},
            "furthest from one device": max(numbers.values()),
        },
    }


class Random(nn.Module):
    """One or two operators on a batch and on parameters."""

    def __init__(self, draw: np.random.Generator) -> None:
        super().__init__()
        self.width, self.rows = int(draw.choice([8, 64, 512])), int(draw.choice([4, 256]))
        self.kinds = [str(k) for k in draw.choice(["linear", "relu", "bias", "gate", "norm"], int(draw.integers(1, 3)))]
        self.parts = nn.ParameterList(
            torch.empty((self.width, self.width) if kind == "linear" else (self.width,), device="meta")
            for kind in self.kinds
        )

    def forward(self, x: Tensor) -> Tensor:
        for kind, w in zip(self.kinds, self.parts, strict=True):
            x = {
                "linear": lambda x, w: x @ w,
                "relu": lambda x, w: x.relu(),
                "bias": lambda x, w: x + w,
                "gate": lambda x, w: x * w,
                "norm": lambda x, w: nn.functional.rms_norm(x, (self.width,), w),
            }[kind](x, w)
        return x.sum()


def is_best(seed: int) -> bool:
    """True if the shardings chosen for a random model on a random cluster are the best of all."""
    draw = np.random.default_rng(seed)
    model = Random(draw)
    program = capture(model, model, [torch.empty(model.rows, model.width, device="meta")]).program
    prices = Prices(
        cluster_of(str(draw.choice(CLUSTERS))), int(draw.choice([2, 4])), 8, byte=float(draw.choice([0, 1e-10]))
    )
    found = best_shardings(program, prices)
    least = least_by_enumeration(program, prices)
    return abs(found.worth(prices.byte) - least) <= 1e-9 * least


def grouped() -> list[list[Run]]:
    """Return groups of complete runs that differ in their plan only."""
    found: dict[str, list[Run]] = defaultdict(list)
    for r in runs():
        if r.seconds and r.is_complete and not r.is_noisy:
            found[r.group].append(r)
    return [own for own in found.values() if len({r.plan for r in own}) > 1]


def beside_authors(own: list[Run]) -> tuple[str, float] | None:
    """Return predicted seconds of the search's plan, relative to the best of a group; both run as tables."""
    first = own[0]
    software = replace(first.software, tensor=1.0) if first.software.tensor < 1 else first.software
    best = min(simulate_step(r.model, r.plan, r.cluster, software) for r in own)
    try:
        found = choose(
            first.model,
            first.cluster,
            first.plan.ranks,
            first.plan.batch,
            first.plan.sequence,
            first.plan.precision,
            software,
        )
    except SearchError:
        return None
    return f"{first.row['sweep']}, batch {first.plan.batch}", found.best.seconds / best


def apart(name: str, ranks: int) -> float:
    """Return the difference of the losses from one device, for a model with a chosen mesh and chosen shardings."""
    subject = SUBJECTS[name]

    def train(distributed: bool) -> list[float]:
        torch.manual_seed(0)
        model = subject.make().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if distributed:
            step: Any = mw.auto(model, [subject.batch(0)], subject.loss, optimizer)
            model.eval()
            return [step(*subject.batch(seed)).item() for seed in range(STEPS)]
        losses: list[float] = []
        for seed in range(STEPS):
            x, y = subject.batch(seed)
            loss = model(x, y) if subject.loss is None else subject.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    wanted = np.array(train(False))
    found = mw.simulate(train, ranks, True)
    return max(float(np.max(np.abs(np.array(losses) / wanted - 1))) for losses in found)
