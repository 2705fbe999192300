"""Static training after a setting changed between steps: kinds of change that give the old number.

    python -m benchmarks stale                       the figure
    python -m benchmarks.stale --only dict hook      kinds of these themes, or with these words in their names

Every kind is trained eagerly on one device, and statically on one simulated rank; some also statically on two ranks
with a sharded batch. The training on one rank stores its programs on disk, and two more trainings load them: one makes
a new static model after each change, and the other has a single static model. Losses, parameters and buffers must be
equal. A kind may be refused by a MeshwrightError instead.
`_stale_kinds` has the table of kinds. A kind that does not change the eager numbers is an error of the kind.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from benchmarks._stale_case import FACTORS, Case, Kind, Run
from benchmarks._stale_kinds import KINDS
from meshwright.comm import current_communicator

CLOSE = 1e-5
"""Largest difference of equal numbers, relative to the largest element of a tensor."""
VISIBLE = 1e-4
"""Smallest difference that a kind must make in eager mode, on the same scale."""
TINY = 1e-4
MOST_CHECK = 0.03
RIGHT, REFUSED, RAISED, STALE, BROKEN = "right", "refused", "raised", "stale", "broken kind"
"""Outcomes of a kind, from good to bad. A broken kind does not change the eager numbers, or eager mode raises."""
OUTCOMES = (RIGHT, REFUSED, RAISED, STALE, BROKEN)


# --- one training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """Losses of each step, parameters and buffers after the last step, and the number of recordings."""

    losses: list[float]
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    recordings: int = 0

    def until(self, step: int) -> Numbers:
        """Return the losses of the steps before `step`, without tensors."""
        return Numbers(self.losses[:step])

    def difference(self, wanted: Numbers) -> tuple[float, str]:
        """Return the largest relative difference, and the first place where numbers are not close."""
        if self.tensors.keys() != wanted.tensors.keys():
            return float("inf"), f"tensors {sorted(self.tensors.keys() ^ wanted.tensors.keys())}"
        found: dict[str, float] = {}
        for step, (mine, other) in enumerate(zip(self.losses, wanted.losses, strict=True), 1):
            found[f"step {step}: {mine:.6g} in place of {other:.6g}"] = _difference(_double(mine), _double(other))
        for name, x in self.tensors.items():
            found[f"{name} after the last step"] = _difference(x, wanted.tensors[name])
        first = next((where for where, difference in found.items() if difference > CLOSE), "")
        return max(found.values(), default=0.0), first


def _double(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if not wanted.numel():
        return 0.0
    a, b = found.double(), wanted.double()
    if not bool((a.isfinite() & b.isfinite()).all()):
        return 0.0 if torch.equal(a.nan_to_num(), b.nan_to_num()) else float("inf")
    return float((a - b).abs().max() / max(float(b.abs().max()), TINY))


def train(kind: Kind, factors: Sequence[float], losses: list[float], ranks: int = 0, restarts: bool = False) -> Numbers:
    """Return the numbers of a training whose setting has a factor in each step: static on `ranks`, or eager if 0.

    With `restarts` a new static model continues after each change. Each step appends to `losses`, so that the caller
    has the losses before an error.
    """
    mesh = mw.ProcessMesh(list(range(ranks)), ["dp"]) if ranks > 1 else None
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with Run(factors, kind.by_loss) as run:
        case = kind.build(run)
        model, optimizer = case.model, case.trained_by
        recordings = 0

        def static() -> Any:
            return mw.to_static(model, None, case.loss, optimizer, case.strategy)

        step_of: Any = static() if ranks else _eager_step(case, optimizer)
        for step, factor in enumerate(factors):
            if step and factor != factors[step - 1]:
                case.change(factor)
                if restarts:
                    recordings += step_of.recordings
                    step_of = static()
            batch = case.batch(step) if mesh is None else _sharded(case.batch(step), mesh)
            with case.around():
                losses.append(float(step_of(*batch)))
        tensors = {name: _whole(x) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
        return Numbers(losses, tensors, recordings + step_of.recordings if ranks else 0)


def _eager_step(case: Case, optimizer: torch.optim.Optimizer | None) -> Any:
    def step(*batch: Any) -> Tensor:
        *inputs, y = batch
        loss = case.loss(case.model(*inputs), y)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            case.model.zero_grad()
        return loss.detach()

    return step


def _sharded(batch: Iterable[Any], mesh: mw.ProcessMesh) -> tuple[Any, ...]:
    return tuple(mw.shard_tensor(x, mesh, [mw.Shard(0)]) if isinstance(x, Tensor) else x for x in batch)


def _whole(x: Tensor) -> Tensor:
    x = mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x
    return x.detach().clone()


# --- one kind --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The outcome of a kind, and the message of its error or the first difference."""

    kind: Kind
    outcome: str
    message: str = ""
    recordings: int = 0
    ranks: int = 1
    restarts: bool = False

    def __str__(self) -> str:
        on = f" on {self.ranks} ranks" if self.ranks > 1 else " after a restart" if self.restarts else ""
        return f"{self.outcome:12}{self.kind.name}{on}: {self.message or f'{self.recordings} recordings'}"


def examine(kind: Kind, factors: Sequence[float] = FACTORS) -> Finding:
    """Return the worst outcome of the kind over one rank and, for kinds that run on a mesh, two ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = _eager(kind, factors)
        if isinstance(wanted, str):
            return Finding(kind, BROKEN, wanted)
        found = [_examine_on(2, kind, factors, wanted)] if kind.on_mesh else []
        with programs_kept():
            found.append(_examine_on(1, kind, factors, wanted))
            for restarts in (True, False):  # both load the programs of the training before
                found.append(replace(_examine_on(1, kind, factors, wanted, restarts), restarts=True))
    return max(found, key=lambda f: OUTCOMES.index(f.outcome))


@contextmanager
def programs_kept() -> Generator[None]:
    """Store recorded programs in a folder inside the context."""
    before = os.environ["MESHWRIGHT_PROGRAMS"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_PROGRAMS"] = folder
        try:
            yield
        finally:
            os.environ["MESHWRIGHT_PROGRAMS"] = before


def _eager(kind: Kind, factors: Sequence[float]) -> Numbers | str:
    """Return the numbers of eager mode on one device, or why the kind is broken."""
    try:
        wanted = mw.simulate(train, 1, kind, factors, [])[0]
        still = mw.simulate(train, 1, kind, [factors[0]] * len(factors), [])[0]
    except Exception as error:  # any error becomes an outcome
        return f"eager mode raises {_first_line(error)}"
    if wanted.difference(still)[0] < VISIBLE:
        return "eager numbers are those of a run without the change"
    return wanted


def _examine_on(ranks: int, kind: Kind, factors: Sequence[float], wanted: Numbers, restarts: bool = False) -> Finding:
    losses: list[list[float]] = [[] for _ in range(ranks)]
    try:
        found = mw.simulate(lambda: train(kind, factors, losses[current_communicator().rank], ranks, restarts), ranks)
    except Exception as error:  # any error becomes an outcome
        worst, where = max((Numbers(seen).difference(wanted.until(len(seen))) for seen in losses), key=itemgetter(0))
        if worst > CLOSE:
            return Finding(kind, STALE, f"{where}; later: {_first_line(error)}", ranks=ranks)
        return Finding(kind, _outcome_of(error), _first_line(error), ranks=ranks)
    worst, where = max((numbers.difference(wanted) for numbers in found), key=itemgetter(0))
    return Finding(kind, RIGHT if worst <= CLOSE else STALE, where if worst > CLOSE else "", found[0].recordings, ranks)


def _outcome_of(error: Exception) -> str:
    return REFUSED if isinstance(error, mw.MeshwrightError) else RAISED


def _first_line(error: Exception) -> str:
    """Return the class and the first line of an error, and the "found" part of a MeshwrightError."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, mw.MeshwrightError):
        return f"{lines[0]}, found: {error.found}"[:200]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def findings(chosen: Iterable[Kind]) -> Iterator[Finding]:
    """Yield the outcome of each kind."""
    return map(examine, chosen)


# --- the cost of deciding that nothing changed -----------------------------------------------------------------------

HIDDEN, BATCH, LENGTH, LAYERS = 256, 4, 8, 2


class Block(nn.Module):
    """A transformer block that reads a setting, as typical models do."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.residual_scale = 4, 1.0
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x_bsd: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x_bsd)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_bsd = x_bsd + self.out(attended) * self.residual_scale
        return x_bsd + self.down(F.gelu(self.up(self.norm2(x_bsd)))) * self.residual_scale


def check_seconds(dist_model: mw.DistModel, batch: Sequence[Any]) -> float:
    """Return the seconds that a static model takes to decide that nothing has changed since its last step."""
    start = time.perf_counter()
    dist_model._program_for(batch, batch)  # pyright: ignore[reportPrivateUsage] - the decision has no public name
    return time.perf_counter() - start


def check_share(turns: int) -> dict[str, float]:
    """Return the median share of a small step that the check takes, and the medians of both in microseconds."""

    def go() -> dict[str, float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        dist_model = mw.to_static(model, None, F.mse_loss, torch.optim.AdamW(model.parameters()))
        batch = torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(BATCH, LENGTH, HIDDEN)
        for _ in range(5):
            dist_model(*batch)
        checks, steps = list[float](), list[float]()
        for _ in range(turns):
            checks.append(min(check_seconds(dist_model, batch) for _ in range(3)))
            start = time.perf_counter()
            dist_model(*batch)
            steps.append(time.perf_counter() - start)
        share = statistics.median(c / s for c, s in zip(checks, steps, strict=True))
        check, step = statistics.median(checks), statistics.median(steps)
        return {"share": round(share, 4), "check us": round(check * 1e6, 1), "step us": round(step * 1e6, 1)}

    return mw.simulate(go, 1)[0]


# --- the figure ------------------------------------------------------------------------------------------------------


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of stale kinds, over all kinds or every fourth."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    check = check_share(turns=50 if quick else 200)
    found = list(findings(list(KINDS.values())[:: 4 if quick else 1]))
    counts = Counter(f.outcome for f in found)
    told = {outcome: {f.kind.name: f.message for f in found if f.outcome == outcome} for outcome in OUTCOMES[1:]}
    return {
        "value": counts[STALE],
        "goal": f"0 of {len(found)} kinds stale; check at most 3 % of a small step",
        "ok": not (counts[STALE] or counts[RAISED] or counts[BROKEN]) and check["share"] <= MOST_CHECK,
        "details": {
            "kinds": len(found),
            "on two ranks": sum(f.kind.on_mesh for f in found),
            "counts": dict(counts),
            "check": check,
            **told,
            "recordings": {f.kind.name: f.recordings for f in found if f.recordings},
            "seconds": round(time.perf_counter() - start),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="themes, or words in the names of kinds")
    parser.add_argument(
        "--bad", action="store_true", help="print only kinds that are stale, raised or without a change"
    )
    parser.add_argument("--check", action="store_true", help="measure only the cost of the check")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    if settings.check:
        print(check_share(turns=200))
        return 0
    chosen = [k for k in KINDS.values() if any(word == k.theme or word in k.name for word in settings.only)]
    counts = Counter[str]()
    for finding in findings(chosen):
        counts[finding.outcome] += 1
        if not settings.bad or finding.outcome not in (RIGHT, REFUSED):
            print(finding, flush=True)
    print(dict(counts))
    return 0 if set(counts) <= {RIGHT, REFUSED} else 1


if __name__ == "__main__":
    sys.exit(main())
