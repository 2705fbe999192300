"""Work and time of quantization with calibration data: GPTQ and AWQ on 4 simulated ranks, and on 2 processes.

The model is the byte Llama with 4 layers, and the data is the source of Python's standard library. The work of a rank
is the floating-point operations of all its operators: products and attention by their sizes, inversions by k³, and
others by the elements of their largest operand. The value is the work of the busiest rank divided by that of one
device. The bytes that ranks receive are beside it, and the same ratio if ranks waited for each other after each block.
The time of 2 processes is divided by that of one process; each process uses one thread. If llm-compressor is installed
(see `_llm_compressor`), both quantize the same model of transformers with the same data, on one process.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
from benchmarks._llm_compressor import ABSENT, of_transformers, quantized_by_rival
from meshwright.comm import current_communicator, launch
from meshwright.models import Llama, LlamaConfig, batch, mark
from meshwright.quantize import NumberFormat, Scheme

RANKS, PROCESSES, TURNS, RIVAL_TURNS = 4, 2, 3, 2
LAYERS, BATCHES, ROWS, LENGTH = 4, 32, 2, 128
INT4 = NumberFormat(4, strategy="group", group_size=16)
METHODS = ("gptq", "awq")
MOST_WORK, MOST_TIME = 1 / 3.8, 0.6


def scheme(method: str) -> Scheme:
    return Scheme(INT4, method="gptq" if method == "gptq" else "awq", act_order=method == "gptq", ignore=("exit.head",))


def make(ranks: int) -> Llama:
    """Return the model; with several ranks, each weight matrix is sharded over all of them."""
    model = Llama(LlamaConfig(layers=LAYERS)).eval()
    if ranks > 1:
        mark(model, mw.ProcessMesh([[list(range(ranks))]], ["pp", "dp", "tp"]))
    return model


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(step, ROWS, LENGTH, 0) for step in range(count)]


# --- counted work ------------------------------------------------------------------------------------------------


def _product(args: tuple[Any, ...]) -> float:
    return 2.0 * args[-2].numel() * args[-1].shape[-1]


def _attention(args: tuple[Any, ...]) -> float:
    return 4.0 * args[0].numel() * args[1].shape[-2]


WORK: Mapping[str, Callable[[tuple[Any, ...]], float]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _product,
    "aten::baddbmm": _product,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_attention_math": _attention,
    "aten::linalg_cholesky_ex": lambda args: args[0].numel() * args[0].shape[-1] / 3,
    "aten::cholesky_inverse": lambda args: args[0].numel() * args[0].shape[-1] * 2 / 3,
}
"""Operator → the floating-point operations of a call with these arguments."""


class CountedWork(TorchDispatchMode):
    """A block in which the floating-point operations of this thread's operators are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = WORK.get(func.name().partition(".")[0])
        if known is not None:
            self.total += known(args)
        elif not func.is_view:
            self.total += max((x.numel() for x in tree_leaves((args, result)) if isinstance(x, Tensor)), default=0)
        return result


def counted(method: str, ranks: int, batches: list[Any]) -> list[dict[str, Any]]:
    """Return the work of each rank, in all and by block, and the bytes that it receives."""

    def program() -> dict[str, Any]:
        model, marks = make(ranks), [0.0]
        seen = current_communicator().seen
        received = seen.total_received
        with CountedWork() as work:
            mw.quantize(model, scheme(method), batches, progress=lambda line: marks.append(work.total))
        return {
            "work": work.total,
            "blocks": [after - before for before, after in pairwise([*marks[:-1], work.total])],
            "received": seen.total_received - received,
        }

    return mw.simulate(program, ranks)


def summary(one: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the work of the ranks, divided by that of one device."""
    work = [rank["work"] / one["work"] for rank in ranks]
    blocks = [max(each) for each in zip(*(rank["blocks"] for rank in ranks), strict=True)]
    return {
        "work of each rank / one device": [round(x, 4) for x in work],
        "busiest": max(work),
        "busiest of each block, summed": round(sum(blocks) / one["work"], 4),
        "GFLOP of one device": round(one["work"] / 1e9, 1),
        "MiB received by each rank": [round(rank["received"] / 2**20, 1) for rank in ranks],
    }


# --- time on processes -------------------------------------------------------------------------------------------


def work(folder: Path, ranks: int, count: int) -> None:
    """Measure the methods on this process, and write the seconds of its turns."""
    torch.set_num_threads(1)
    mw.init_process()
    batches = data(count)
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(TURNS + 1):
        for method in METHODS:
            model = make(ranks)
            start = time.perf_counter()
            mw.quantize(model, scheme(method), batches)
            if turn:  # the first turn plans
                found[method].append(time.perf_counter() - start)
    (folder / f"{ranks}.{mw.get_rank()}").write_text(json.dumps(found))


def seconds(ranks: int, count: int) -> dict[str, float]:
    """Return the median seconds of each method on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        code = launch(["-m", "benchmarks.quantize_speed", folder, str(ranks), str(count)], ranks, timeout=1200)
        if code:
            raise RuntimeError(f"a rank failed with status {code}")
        each = [json.loads((Path(folder) / f"{ranks}.{rank}").read_text()) for rank in range(ranks)]
    return {method: max(statistics.median(rank[method]) for rank in each) for method in METHODS}


def beside_rival(batches: list[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Return the seconds of each method for a model of transformers: ours, and those of llm-compressor if installed."""
    config = LlamaConfig(layers=LAYERS)
    model, calls = of_transformers(Llama(config), config), [{"input_ids": tokens} for tokens, _ in batches]
    schemes = {method: replace(scheme(method), ignore=("lm_head",)) for method in METHODS}
    ours: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for method in METHODS:
        turns: list[float] = []
        for _ in range(RIVAL_TURNS):
            copied = copy.deepcopy(model)
            start = time.perf_counter()
            mw.quantize(copied, schemes[method], calls)
            turns.append(time.perf_counter() - start)
        ours[method] = statistics.median(turns)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        rival = quantized_by_rival(model, schemes, [tokens for tokens, _ in batches], Path(folder), RIVAL_TURNS)
    theirs = {} if rival is None else {method: statistics.median(turns) for method, turns in rival.seconds.items()}
    return {"ours": ours, "llm-compressor": theirs}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the work of the busiest rank, and the time of 2 processes."""
    count = BATCHES // 2 if quick else BATCHES
    batches = data(count)
    rows = {method: summary(counted(method, 1, batches)[0], counted(method, RANKS, batches)) for method in METHODS}
    one, two = seconds(1, count), seconds(PROCESSES, count)
    busiest = max(row["busiest"] for row in rows.values())
    slowest = max(two[method] / one[method] for method in METHODS)
    beside = beside_rival(batches)
    ratios = {method: beside["ours"][method] / took for method, took in beside["llm-compressor"].items()}
    return {
        "name": "quantize_speed",
        "value": {
            "busiest of 4 ranks / one device, counted work": round(busiest, 4),
            "2 processes / one process, seconds": round(slowest, 3),
        },
        "goal": "counted work at most 1/3.8 = 0.263; seconds at most 0.6; one process not slower than llm-compressor",
        "rival": {
            "name": "llm-compressor",
            "value": {f"ours / its seconds, {method}": round(ratio, 3) for method, ratio in ratios.items()} or ABSENT,
        },
        "ok": busiest <= MOST_WORK and slowest <= MOST_TIME and all(ratio <= 1 for ratio in ratios.values()),
        "details": {
            "calibration tokens": count * ROWS * LENGTH,
            "methods": rows,
            "seconds": {"one process": one, f"{PROCESSES} processes": two},
            "seconds, one process, a model of transformers": beside,
        },
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(run()))
