"""Clean training steps on real processes with all checks on: every warning or error is a false alarm."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import nn

import meshwright as mw
from benchmarks._fault_runs import Ranks, run_ranks
from benchmarks._faults_live import hold_lock

_HERE = "benchmarks._clean_steps"
RANKS = 3
_LONG, _HOLD, _SHORT_HOLD = 1000, 60.0, 3.0
_LIMIT_PER_STEP, _START_LIMIT = 0.5, 180.0


def train(folder: str, steps: str) -> None:
    """Train a small model with replicas; rank 1 holds the interpreter's lock once in the middle."""
    mw.init_process(backend="gloo")
    count, rank = int(steps), mw.get_rank()
    hold = _HOLD if count >= _LONG else _SHORT_HOLD
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        error = _steps(count, hold, rank)
    told = [str(each.message) for each in heard if _is_ours(each)]
    (Path(folder) / f"told.{rank}").write_text(json.dumps(told + error))


def _steps(count: int, hold: float, rank: int) -> list[str]:
    """Return the error of the steps, if there is one."""
    torch.manual_seed(0)
    mesh = mw.init_mesh(dp=-1)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mw.parallelize(model, optimizer, mesh, mw.Parallelism())
    try:
        for step in range(count):
            x = mw.shard_tensor(torch.randn(12, 16), mesh, [mw.Shard(0)])
            if step == count // 2 and rank == 1:
                hold_lock(hold)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    except mw.MeshwrightError as error:
        return [str(error)]
    return []


def _is_ours(warning: warnings.WarningMessage) -> bool:
    text = str(warning.message)
    return "rank" in text or "meshwright" in warning.filename


def false_alarms(steps: int) -> int:
    """Return the number of our warnings and errors in clean steps of three processes; a failed rank counts, too."""
    return len(alarms(steps))


def alarms(steps: int) -> list[str]:
    """Return the warnings and errors themselves."""
    limit = _START_LIMIT + _HOLD + steps * _LIMIT_PER_STEP
    found: list[str] = []

    def look(run: Ranks) -> None:
        for rank in range(RANKS):
            path = run.folder / f"told.{rank}"
            found.extend(json.loads(path.read_text()) if path.exists() else [f"rank {rank} wrote no report"])

    ended = run_ranks(f"{_HERE}:train", RANKS, arguments=[str(steps)], limit=limit, also=look)
    return found + [f"rank {each.rank}: status {each.status}: {each.output[-500:]}" for each in ended if each.status]
