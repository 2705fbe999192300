"""Rows 2 and 10 to 13: runs that are killed or asked to stop, and resume, also on other meshes."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import meshwright as mw
from benchmarks._fault_runs import Ended, Ranks, Verdict, run_ranks

STEPS, SAMPLES, BATCH = 6, 48, 8
KILLS, LIMIT = 20, 120.0
PROGRAM = "benchmarks._faults_resume:train"
STOPPED = 128 + signal.SIGTERM


class _Numbered(Dataset[Any]):
    """Samples whose inputs follow from their number, which is the first input."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> Any:
        x = torch.randn(8, generator=torch.Generator().manual_seed(at))
        x[0] = at
        return x, at % 4


def _model(way: str) -> tuple[nn.Module, mw.ProcessMesh]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = mw.ProcessMesh(range(ranks), dim_names=["x"])

    def cut(name: str, layer: nn.Module, on: mw.ProcessMesh) -> None:
        for key, p in list(layer.named_parameters(recurse=False)):
            setattr(layer, key, mw.shard_tensor(p, on, [mw.Shard(0)]))

    return mw.shard_layer(model, mesh, cut if way == "cut" else None), mesh


def train(folder: str, run: str, way: str, steps: str, every: str = "1", seconds: str = "0") -> None:
    """Train one rank with checkpoints in the folder `run`, and write its results into `folder`."""
    rank = mw.init_process().rank
    model, mesh = _model(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(_Numbered(), batch_sampler=mw.GlobalSampler(_Numbered(), batch=BATCH, seed=3))
    data = mw.shard_dataloader(loader, mesh, "x")
    seen: list[int] = []

    def loss(out: Any, labels: Any) -> Any:
        Path(folder, f"begun.{rank}").touch()
        time.sleep(float(seconds))
        return F.cross_entropy(out, labels)

    model.register_forward_pre_hook(lambda _, xs: seen.extend(mw.unshard_dtensor(xs[0])[:, 0].int().tolist()))
    training = mw.Training(int(steps), run, save_every=int(every), show=False, keep=None)
    end = mw.train(model, optimizer, data, training, loss=loss, scheduler=scheduler)
    told = {"begun": end.begun, "losses": end.losses, "seen": seen, "sha": _sha(model), "stopped": end.stopped}
    Path(folder, f"end.{rank}").write_text(json.dumps(told))
    os._exit(end.exit_code)


def _sha(model: nn.Module) -> str:
    whole = {name: mw.unshard_dtensor(p.detach()) for name, p in sorted(model.named_parameters())}
    return sha256(b"".join(p.contiguous().numpy().tobytes() for p in whole.values())).hexdigest()


def _run(
    place: Path, ranks: int, way: str, steps: int, fault: Callable[[Ranks], object] | None = None, seconds: float = 0.0
) -> tuple[list[Ended], dict[str, Any]]:
    """Return how the ranks ended, and what rank 0 wrote at its end."""
    told: dict[str, Any] = {}

    def also(run: Ranks) -> None:
        if (run.folder / "end.0").exists():
            told.update(json.loads((run.folder / "end.0").read_text()))

    arguments = [str(place), way, str(steps), "1", str(seconds)]
    return run_ranks(PROGRAM, ranks, fault, arguments, limit=LIMIT, also=also), told


def killed_and_restarted() -> Verdict:
    """A rank is killed at a random moment of a step; the resumed run ends bitwise as the one without a fault."""
    draw, right = random.Random(0), 0
    with tempfile.TemporaryDirectory() as place:
        _, expected = _run(Path(place, "whole"), 2, "whole", STEPS)
        for n in range(KILLS):
            where = Path(place, f"killed{n}")

            def kill(run: Ranks) -> None:
                run.wait_for("begun.0", LIMIT)
                time.sleep(draw.uniform(0.0, 0.3))
                run.send(draw.randrange(2), signal.SIGKILL)

            _run(where, 2, "whole", STEPS, kill, 0.05)
            _, told = _run(where, 2, "whole", STEPS)
            right += bool(told) and told["sha"] == expected["sha"]
    return Verdict(right == KILLS, f"{right} of {KILLS} restarts bitwise equal")


def on_other_meshes() -> Verdict:
    """Runs resume from 2 to 1, 1 to 2, 4 to 2 ranks, sharded or replicated weights: equal weights, losses close."""
    ways = [(2, "whole", 1, "whole"), (1, "whole", 2, "cut"), (4, "cut", 2, "whole"), (2, "cut", 2, "whole")]
    found: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        _, expected = _run(Path(place, "whole"), 1, "whole", STEPS)
        for n, (ranks, way, then, other) in enumerate(ways):
            _, first = _run(Path(place, str(n)), ranks, way, 3)
            _, same = _run(Path(place, str(n)), then, other, 3)
            _, told = _run(Path(place, str(n)), then, other, STEPS)
            apart = max(abs(a - b) for a, b in zip(told["losses"], expected["losses"][3:], strict=True))
            good = same["sha"] == first["sha"] and apart < 1e-4
            found.append(f"{ranks} {way} to {then} {other}: {'equal' if good else 'apart'}, losses {apart:.1e} apart")
    return Verdict(all("equal" in text for text in found), "; ".join(found))


def bitwise_on_the_same_mesh() -> Verdict:
    """Dropout, AdamW, schedule: a run that resumes after any step k ends bitwise as the one without a stop."""
    equal: list[int] = []
    with tempfile.TemporaryDirectory() as place:
        _, expected = _run(Path(place, "whole"), 2, "whole", STEPS)
        for k in range(1, STEPS):
            _run(Path(place, str(k)), 2, "whole", k)
            _, told = _run(Path(place, str(k)), 2, "whole", STEPS)
            if told["sha"] == expected["sha"] and told["losses"] == expected["losses"][k:]:
                equal.append(k)
    return Verdict(len(equal) == STEPS - 1, f"equal after steps {equal}")


def every_sample_once() -> Verdict:
    """A run on 2 ranks resumes on 3: every sample of the epoch is seen exactly once."""
    with tempfile.TemporaryDirectory() as place:
        _, first = _run(Path(place, "run"), 2, "whole", 2)
        _, then = _run(Path(place, "run"), 3, "whole", STEPS)
    seen = [*first["seen"], *then["seen"]]
    return Verdict(sorted(seen) == list(range(SAMPLES)), f"{len(set(seen))} different ones of {len(seen)} seen")


def asked_to_stop(times: int = 1) -> Verdict:
    """SIGTERM during a step: the step is saved, the exit code is 143, and the run resumes from there."""
    with tempfile.TemporaryDirectory() as place:
        where = Path(place, "run")

        def stop(run: Ranks) -> None:
            run.wait_for("begun.1", LIMIT)
            for _ in range(times):
                for rank in range(2):
                    run.send(rank, signal.SIGTERM)
                time.sleep(0.02)

        ended, told = _run(where, 2, "whole", 10**6, stop, 0.05)
        done = len(told.get("losses", ()))
        _, then = _run(where, 2, "whole", done + 2)
    codes, seconds = [e.status for e in ended], max(e.seconds for e in ended)
    good = codes == [STOPPED] * 2 and then.get("begun") == done
    return Verdict(good, f"exit codes {codes}, {done} steps, went on from {then.get('begun')}", seconds)


def asked_to_stop_again() -> Verdict:
    """SIGTERM many times, also during the save: the same, and nothing is damaged."""
    return asked_to_stop(12)


ROWS = {
    2: killed_and_restarted,
    10: on_other_meshes,
    11: bitwise_on_the_same_mesh,
    12: every_sample_once,
    13: asked_to_stop,
}
