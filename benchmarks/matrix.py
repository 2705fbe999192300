"""Models that others wrote, unmodified, under every kind of parallelism, eager and static, compared with one device.

    python -m benchmarks.matrix                                   every cell
    python -m benchmarks.matrix --model Llama --setting tp        some of them
    python -m benchmarks.matrix --page docs/matrix.md             the table as a page, too
    python -m benchmarks.matrix --kept cells.json --model Llama   in addition to the cells in that file

A cell is three steps of AdamW on simulated ranks. Losses and the gradients of each step are compared with those of one
device. In eager mode, calls are also compared as between processes. The verdict of a cell is right, not applicable for
a reason, a named bug, or wrong. Each model runs in a process of its own. A cell that takes too long is ended and
reported.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from benchmarks._matrix_models import MODELS, Subject
from benchmarks._matrix_page import page
from benchmarks._matrix_settings import EAGER, MODES, SETTINGS, STATIC, Setting, follow, mark, shard_states
from meshwright.errors import CommError
from tests.compared_ranks import compared

GOAL = 1e-5
STEPS = 3
ROUNDINGS = 4
"""Allowed error, as a multiple of the error that one rounding of the weights causes."""
FLOOR = 1e-3
"""Lower bound of the scale of a gradient, as a share of the norm of all gradients."""
PATIENCE = 150
"""Seconds that a cell may take."""
WITHOUT_NUMBERS = "Python needs a tensor's numbers there"
"""Verdict about a forward pass that cannot be one program."""
QUICK = ("GPT-2", "T5", "ViT", "Mixtral"), ("dp", "dp×tp")

Cell = tuple[str, str]
"""A setting and a mode."""
Table = dict[str, dict[str, Any]]
"""Model → its cells by setting and mode, as JSON."""


@dataclass(frozen=True)
class Outcome:
    """The results of a training: losses, and by step the gradients by name."""

    losses: Tensor
    gradients: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True)
class Found:
    """The result of a cell: its verdict, the reason, the distance from one device, and the seconds.

    Verdicts are "ok", "n/a", "wrong", "slow", "refused" (an error of Meshwright's own) and "bug" (any other error).
    """

    verdict: str
    why: str = ""
    worst: float | None = None
    seconds: float = 0.0


def optimizer_of(model: torch.nn.Module, begun: bool = True) -> torch.optim.Optimizer:
    """Return AdamW with its gradients among the states, and an eps that is larger than the rounding errors of sums.

    With `begun`, all states exist before the first step, so that one program makes all steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)
    optimizer.register_step_post_hook(_keep_gradients)
    for p in model.parameters() if begun else ():
        if p.requires_grad:
            zeros = {key: torch.zeros_like(p.detach()) for key in ("exp_avg", "exp_avg_sq", "gradient")}
            optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
    return optimizer


def _keep_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                optimizer.state[p]["gradient"] = p.grad.clone()


def train(subject: Subject, setting: Setting | None, mode: str = EAGER, moved: bool = False) -> Outcome:
    """Return the results of three steps, on one device if `setting` is None; `moved` starts one rounding away."""
    torch.manual_seed(0)
    model = subject.make()
    if moved:
        perturb(model)
    step, optimizer = step_and_optimizer(model, subject, setting, mode)
    losses: list[float] = []
    gradients: list[Mapping[str, Tensor]] = []
    for seed in range(STEPS):
        losses.append(step(subject.draw(seed)).item())
        kept = {n: optimizer.state[p].get("gradient") for n, p in model.named_parameters() if p.requires_grad}
        gradients.append({n: mw.unshard_dtensor(g).clone() for n, g in kept.items() if g is not None})
    return Outcome(torch.tensor(losses, dtype=torch.float64), tuple(gradients))


@torch.no_grad()
def perturb(model: torch.nn.Module) -> None:
    """Move each weight by one rounding, up or down."""
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.mul_(1 + torch.finfo(p.dtype).eps * (2 * torch.randint(2, p.shape, generator=g) - 1))


def step_and_optimizer(model: torch.nn.Module, subject: Subject, setting: Setting | None, mode: str) -> Any:
    """Return a function that makes a step with a batch, and the optimizer."""
    if setting is None:
        optimizer = optimizer_of(model)
        return eagerly(model, optimizer, tuple), optimizer
    if setting.chosen:
        return _chosen(model, subject, mode)
    mark(model, setting, mode)
    optimizer = optimizer_of(model, begun=not setting.zero)
    if mode == STATIC:
        options = {"pipeline": {"enable": True}} if setting.stages else setting.options or {"full_graph": False}
        static = mw.to_static(model, None, None, optimizer, mw.Strategy.of(**options))
        return (lambda batch: static(*setting.enter(batch))), optimizer
    shard_states(optimizer, model, setting)
    return eagerly(model, optimizer, setting.enter), optimizer


def _chosen(model: torch.nn.Module, subject: Subject, mode: str) -> Any:
    """Return the same for a model without marks: `auto`'s static step, or eager mode with its best plan's layouts."""
    optimizer = optimizer_of(model)
    static = mw.auto(model, [subject.draw(0)], optimizer=optimizer)
    if mode == STATIC:
        return (lambda batch: static(*batch)), optimizer
    enter = follow(model, static.strategy.layouts or {})
    optimizer = optimizer_of(model)
    return eagerly(model, optimizer, enter), optimizer


def eagerly(model: torch.nn.Module, optimizer: torch.optim.Optimizer, enter: Any) -> Any:
    def step(batch: Sequence[Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = model(*enter(batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def difference(found: Outcome, wanted: Outcome) -> tuple[float, str]:
    """Return the largest relative difference, and its place."""
    far = (found.losses - wanted.losses).abs() / wanted.losses.abs()
    worst = [(_number(far[s]), f"loss {s}") for s in range(STEPS)]
    for s, (have, want) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        floor = FLOOR * float(torch.stack([g.double().norm() for g in want.values()]).norm())
        for name in want.keys() | have.keys():
            g, h = (x.get(name, torch.zeros(())).double() for x in (want, have))  # a missing gradient counts as zero
            worst.append((_number((h - g).norm() / max(float(g.norm()), floor)), f"gradient {s} of {name}"))
    return max(worst)


def _number(x: Tensor) -> float:
    return float("inf") if bool(x.isnan()) else float(x)


def check(subject: Subject, wanted: Outcome, close: float, cell: Cell) -> Found:
    """Return the worst result of all simulated ranks; right if its distance from one device is at most `close`."""
    setting, mode = SETTINGS[cell[0]], cell[1]
    unfit = setting.unfit(subject.make(), subject.draw(0))
    if unfit:
        return Found("n/a", unfit)
    start = time.perf_counter()
    is_compared = mode == EAGER and not setting.chosen  # ranks that share a capture run other code than processes
    try:
        with compared() if is_compared else nullcontext():
            gaps = mw.simulate(lambda: difference(train(subject, setting, mode), wanted), setting.ranks)
    except Exception as error:
        verdict, why = _refusal(error)
        return Found(verdict, why, seconds=time.perf_counter() - start)
    worst, where = max(gaps)
    right = worst <= close
    return Found("ok" if right else "wrong", "" if right else where, worst, time.perf_counter() - start)


def _refusal(error: Exception) -> tuple[str, str]:
    """Return the verdict of a cell that raised an error, and the reason."""
    if WITHOUT_NUMBERS in str(error):
        return "n/a", "the forward pass asks a tensor's numbers"
    is_refusal = isinstance(error, mw.MeshwrightError) and not isinstance(error, CommError)
    return "refused" if is_refusal else "bug", _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [""]
    text = re.sub(r"/\S*/site-packages/", "", "; ".join(lines[:3]))  # the folder differs between machines
    return f"{type(error).__name__}: {text}"[:300]


def child(model: str, cells: Sequence[Cell]) -> None:
    """Print a line of JSON per cell: this process runs one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    subject = MODELS[model]
    wanted, close = on_one_device(subject)
    print(json.dumps({"close": close}), flush=True)
    for cell in cells:
        print(json.dumps(asdict(check(subject, wanted, close, cell))), flush=True)


def on_one_device(subject: Subject) -> tuple[Outcome, float]:
    """Return the outcome on one device, and the largest difference that roundings explain."""
    wanted = train(subject, None)
    return wanted, max(GOAL, ROUNDINGS * difference(train(subject, None, moved=True), wanted)[0])


def measured(model: str, cells: Sequence[Cell], patience: float) -> Iterator[tuple[Cell, Found]]:
    """Yield each cell of a model; a process that hangs or dies is replaced for the remaining cells."""
    left = list(cells)
    while left:
        with _Child(model, left, patience) as child:
            begun = child.next()
            if begun is None or isinstance(begun, str):
                yield from ((cell, Found("bug", "on one device")) for cell in left)
                return
            while left:
                found = child.next()
                yield left.pop(0), Found(**found) if isinstance(found, dict) else Found(found or "bug", "no result")
                if not isinstance(found, dict):
                    break


class _Child:
    """A process for cells of a model, and its output."""

    def __init__(self, model: str, cells: Sequence[Cell], patience: float) -> None:
        words = [word for cell in cells for word in cell]
        command = [sys.executable, "-m", "benchmarks.matrix", "--child", model, *words]
        self.process = Popen(command, stdout=PIPE, stderr=DEVNULL, text=True)
        self.patience, self.lines = patience, Queue[str | None]()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.reader.join()
        self.process.__exit__(None, None, None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next(self) -> dict[str, Any] | str | None:
        """Return the next result; "slow" if it takes too long, None if the process ended."""
        try:
            line = self.lines.get(timeout=self.patience)
        except Empty:
            return "slow"
        return None if line is None else json.loads(line)


def run(
    quick: bool = False,
    models: Sequence[str] = (),
    settings: Sequence[str] = (),
    modes: Sequence[str] = (),
    patience: float = PATIENCE,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Return the figure: cells that are neither right nor not applicable, of these and of those in the file `kept`."""
    models = models or (QUICK[0] if quick else tuple(MODELS))
    settings = settings or (QUICK[1] if quick else tuple(SETTINGS))
    cells = [(s, m) for s in settings for m in modes or MODES]
    table: Table = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for model in models:
        for cell, found in measured(model, cells, patience):
            row = table.setdefault(model, {})
            row[" ".join(cell)] = {k: v for k, v in asdict(found).items() if v not in ("", None)}
            print(f"# {model} {' '.join(cell)}: {found}", file=sys.stderr, flush=True)
            if kept is not None:
                kept.write_text(json.dumps(table))
    return figure_of(table)


def figure_of(table: Table) -> dict[str, Any]:
    """Return the figure of a table, with sorted rows and columns."""
    names = [f"{setting} {mode}" for setting in SETTINGS for mode in MODES]
    table = {model: {n: table[model][n] for n in names if n in table[model]} for model in MODELS if model in table}
    found = [cell for row in table.values() for cell in row.values()]
    verdicts = Counter(cell["verdict"] for cell in found)
    open_cells = sum(n for verdict, n in verdicts.items() if verdict not in ("ok", "n/a"))
    seconds = round(sum(cell["seconds"] for cell in found))
    details = {"verdicts": dict(verdicts), "seconds": seconds, "table": table}
    return {"name": "matrix", "value": open_cells, "goal": 0, "ok": open_cells == 0, "details": details}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells")
    parser.add_argument("--model", nargs="+", default=[], choices=tuple(MODELS))
    parser.add_argument("--setting", nargs="+", default=[], choices=tuple(SETTINGS))
    parser.add_argument("--mode", nargs="+", default=[], choices=MODES)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds that a cell may take")
    parser.add_argument("--kept", type=Path, help="file of stored cells; measured cells are added to it")
    parser.add_argument("--page", type=Path, help="path of the page to write the table to")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        model, *words = given.child
        child(model, list(zip(words[::2], words[1::2], strict=True)))
        return
    figure = run(given.quick, given.model, given.setting, given.mode, given.patience, given.kept)
    if given.page:
        given.page.write_text(page(figure))
    print(json.dumps(figure))


if __name__ == "__main__":
    main()
