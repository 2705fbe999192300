"""Part of `gpu`: RMSNorm, forward and backward: plain operators, `F.rms_norm`, `torch.compile`, and our program."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any

import torch
from torch import Tensor

import meshwright as mw

from ._gpu_device import Setting, attempt, in_turns_ms, main_of, ratios
from .rmsnorm import Norm, check_gradients, composed, eager_call, our_call, own

SHAPES = [(2048, 4096), (8192, 4096), (16384, 8192)]
SMALL = [(64, 128)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def norm(setting: Setting) -> dict[str, Any]:
    """Return the time of each contender divided by ours, by shape and dtype, and geometric means over shapes."""
    shapes = SHAPES[:2] if setting.quick else SHAPES
    rows = {
        f"{rows} x {width} {name}": attempt(lambda r=rows, w=width, d=dtype: _case(r, w, d, setting))
        for rows, width in (shapes if setting.is_large else SMALL)
        for name, dtype in DTYPES.items()
    }
    return {"rows": rows, "means": {name: _means(rows, name) for name in DTYPES}}


def _means(rows: dict[str, Any], dtype: str) -> dict[str, float]:
    found = [row["ratio to ours"] for name, row in rows.items() if name.endswith(dtype) and isinstance(row, dict)]
    return {name: _mean([row[name] for row in found]) for name in (found[0] if found else {})}


def _mean(values: list[float]) -> float:
    return round(exp(sum(map(log, values)) / len(values)), 3)


def _case(rows: int, width: int, dtype: torch.dtype, setting: Setting) -> dict[str, Any]:
    return mw.simulate(lambda: _times(rows, width, dtype, setting), 1)[0]


def _times(rows: int, width: int, dtype: torch.dtype, setting: Setting) -> dict[str, Any]:
    torch.manual_seed(0)
    models = {
        "composed": Norm(rows, width, dtype, composed),
        "F.rms_norm": Norm(rows, width, dtype, own),
        "torch.compile": Norm(rows, width, dtype, composed),
    }
    for model in models.values():
        model.to(setting.device).load_state_dict(models["composed"].state_dict())
    g = torch.randn(rows, width).to(setting.device, dtype)
    models["torch.compile"].compile(dynamic=False)
    calls: dict[str, Callable[[], list[Tensor]]] = {name: eager_call(model, g) for name, model in models.items()}
    calls["ours"] = our_call(models["composed"], g)
    check_gradients(calls["composed"](), calls["ours"](), dtype)
    ms = in_turns_ms(calls, setting)
    return {"ms": ms, "ratio to ours": ratios(ms, "ours")}


if __name__ == "__main__":
    main_of(norm)
