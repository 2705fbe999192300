"""Cells of the matrix on real processes: values and gradients that differ from one device.

    python -m benchmarks matrix_processes                       twelve cells: six kinds of models, eager and static
    python -m benchmarks.matrix_processes --cell Llama pp static

A cell is the same as in `benchmarks.matrix`, with Gloo between four processes of this machine. The same processes run
all cells. If a cell ends them, it is reported, and new processes run the remaining cells.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks._matrix_models import MODELS
from benchmarks._matrix_settings import SETTINGS
from benchmarks.matrix import GOAL, ROUNDINGS, Found, Outcome, difference, train
from meshwright.comm import launch

RANKS = 4
PATIENCE = 180
"""Seconds that a cell may take, with the imports of its processes."""
Cell = tuple[str, str, str]
"""Model, setting, mode."""
CELLS: tuple[Cell, ...] = (
    ("Llama", "dp×tp", "eager"), ("Llama", "pp", "static"),
    ("GPT-2", "ZeRO-3", "static"), ("GPT-2", "sp", "eager"),
    ("BERT", "tp", "static"), ("BERT", "ZeRO-3", "eager"),
    ("T5", "dp×tp", "eager"), ("T5", "pp", "eager"),
    ("ViT", "dp", "static"), ("ViT", "tp", "eager"),
    ("Qwen3-MoE", "dp×tp", "static"), ("Mamba-2", "dp×tp", "eager"),
)  # fmt: skip
QUICK = CELLS[0], CELLS[4]


def run(quick: bool = False, cells: Sequence[Cell] = ()) -> dict[str, Any]:
    """Return the figure: the number of cells that are not right on every rank."""
    start = time.perf_counter()
    found = dict(measured(cells or (QUICK if quick else CELLS)))
    wrong = sum(cell.verdict != "ok" for cell in found.values())
    rows = {" ".join(cell): {k: v for k, v in asdict(f).items() if v not in ("", None)} for cell, f in found.items()}
    return {
        "name": "matrix_processes",
        "value": wrong,
        "goal": f"0 of {len(found)} cells on {RANKS} processes away from one device",
        "ok": wrong == 0,
        "details": {"ranks": RANKS, "seconds": round(time.perf_counter() - start), "cells": rows},
    }


def measured(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Found]]:
    """Yield each cell; if the processes end early, new ones run the remaining cells."""
    left = list(cells)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                "-m",
                "benchmarks.matrix_processes",
                "--child",
                folder,
                *(word for cell in left for word in cell),
            ]
            launch(command, RANKS, {"OMP_NUM_THREADS": "1"}, timeout=PATIENCE * len(left))
            told = [_results(Path(folder) / str(rank)) for rank in range(RANKS)]
        for ranks in zip(*told, strict=False):
            yield left.pop(0), max(ranks, key=lambda f: (f.verdict != "ok", f.worst or 0.0))
        if left:
            yield left.pop(0), Found("bug", "its processes ended, or were too slow")


def _results(path: Path) -> list[Found]:
    """Return the results that a rank wrote, in the order of the cells."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def one_rank(folder: Path, cells: Sequence[Cell]) -> None:
    """Run the cells on one rank, and write a line of JSON for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mw.init_process()
    known: dict[str, tuple[Outcome, float]] = {}
    with (folder / os.environ["RANK"]).open("a") as lines:
        for model, setting, mode in cells:
            start = time.perf_counter()
            if model not in known:
                wanted = train(MODELS[model], None)
                rounding = difference(train(MODELS[model], None, moved=True), wanted)[0]
                known[model] = wanted, max(GOAL, ROUNDINGS * rounding)
            wanted, close = known[model]
            worst, where = difference(train(MODELS[model], SETTINGS[setting], mode), wanted)
            seconds = time.perf_counter() - start
            found = Found("ok", "", worst, seconds) if worst <= close else Found("wrong", where, worst, seconds)
            print(json.dumps(asdict(found)), file=lines, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cells")
    parser.add_argument("--cell", nargs=3, action="append", default=[], metavar=("MODEL", "SETTING", "MODE"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        folder, *words = given.child
        one_rank(Path(folder), list(zip(words[::3], words[1::3], words[2::3], strict=True)))
        return
    print(json.dumps(run(given.quick, [tuple(cell) for cell in given.cell])))


if __name__ == "__main__":
    main()
