"""Part of `gpu`: training in two processes that share the device, through the host; and NCCL with one rank.

NCCL refuses two ranks on one device. So the processes use Gloo, which copies through the host.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import init_process, launch
from meshwright.comm.torch_hooks import open_backend
from tests.device.training import train

from ._gpu_device import Setting, attempt, main_of

KINDS = ("dp", "tp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "cp", "ep", "pp", "words, tp")
QUICK = ("dp", "ZeRO-3", "pp")
CASES = [(kind, static) for kind in KINDS for static in (False, True)]


def processes(setting: Setting) -> dict[str, Any]:
    """Return the largest difference from the CPU by kind of parallelism, and the results of NCCL's collectives."""
    with tempfile.TemporaryDirectory() as folder:
        words = [setting.device.type, folder, "quick" if setting.quick else "all"]
        code = launch(["-m", "benchmarks._gpu_processes", "rank", *words], 2)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return {"exit code": code, "difference from the CPU": ranks[:1], "nccl": attempt(lambda: _alone(setting))}


def _rank(kind: str, folder: str, amount: str) -> None:
    if kind == "mesh":
        import_module("tests.device.registered")
    here = init_process(backend=None if kind == "mesh" else "gloo")
    device = torch.device(kind, here.rank) if kind == "mesh" else torch.device(kind)
    found: dict[str, Any] = {}
    for case, static in CASES:
        if amount == "all" or case in QUICK:
            name = f"{case}, {'static' if static else 'eager'}"
            found[name] = attempt(lambda c=case, s=static: _difference(c, s, device))
            print(name, found[name], file=sys.stderr, flush=True)
    (Path(folder) / f"{here.rank}.json").write_text(json.dumps(found))


def _difference(case: str, static: bool, device: torch.device) -> float:
    on_cpu, _ = train(case, static, "cpu")
    on_device, _ = train(case, static, device)
    return max(float((a - b).abs().max()) for a, b in zip(on_cpu, on_device, strict=True))


def _alone(setting: Setting) -> dict[str, Any]:
    """Return "ok" or the error of each collective of NCCL in a group of one rank, by its name and dtype."""
    if setting.device.type != "cuda":
        return {"all": "no NCCL for this device"}
    store = torch.distributed.HashStore()
    backend = open_backend("nccl", store, 0, 1, timedelta(seconds=60), loopback=True)
    calls = {
        "all_reduce": lambda x, out: backend.all_reduce(out, x, "sum"),
        "all_gather": lambda x, out: backend.all_gather(out, x),
        "reduce_scatter": lambda x, out: backend.reduce_scatter(out, x),
        "all_to_all": lambda x, out: backend.all_to_all(out, x, [x.numel()], [x.numel()]),
        "exchange": lambda x, out: backend.exchange([(0, 0, x)], [(0, 0, out)]),
        "barrier": lambda x, out: (backend.barrier(), out.copy_(x)),
    }
    return {
        f"{name} {dtype} {count}": attempt(lambda c=call, d=dtype, n=count: _same(c, d, n, setting.device))
        for name, call in calls.items()
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        for count in (8, 0)
    }


def _same(call: Callable[[Tensor, Tensor], object], dtype: torch.dtype, count: int, device: torch.device) -> str:
    x = torch.arange(count, device=device).to(dtype)
    out = torch.zeros_like(x)
    call(x, out)
    return "ok" if torch.equal(out.cpu(), x.cpu()) else f"{out} instead of {x}"


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _rank(*sys.argv[2:])
    else:
        main_of(processes)
