"""Part of `gpu`: cost of eager calls on the device, beside plain tensors and DTensor; the block of `overhead`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import overhead
from ._gpu_device import Setting, attempt, in_turns_ms, main_of, ratios


def eager(setting: Setting) -> dict[str, Any]:
    """Return milliseconds of a forward and a backward pass of the block, and of one addition, as ratios to plain."""
    with overhead.libraries():
        return {"block": _block(setting), "addition": _addition(setting)}


def _block(setting: Setting) -> Any:
    kind = setting.device.type
    makers: dict[str, Callable[[], overhead.Candidate]] = {
        "plain": lambda: overhead.plain_block(device=kind),
        "ours": lambda: overhead.ours_block(device=kind),
        "DTensor": lambda: overhead.dtensor_block(fused=True, device=kind),
        "plain, attention not fused": lambda: overhead.plain_block(fused=False, device=kind),
        "DTensor, attention not fused": lambda: overhead.dtensor_block(fused=False, device=kind),
    }
    calls = {name: attempt(lambda m=make: _checked(overhead.step(m()))) for name, make in makers.items()}
    return _measured(calls, setting)


def _checked(call: Callable[[], object]) -> Callable[[], object]:
    call()
    return call


def _addition(setting: Setting) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    import meshwright as mw

    whole = torch.randn(4 * overhead.RANKS, 4, device=setting.device)
    local = whole[:4].clone()
    mesh = mw.ProcessMesh(list(range(overhead.RANKS)), dim_names=["tp"])

    def theirs() -> Tensor:
        return distribute_tensor(whole, overhead.device_mesh((overhead.RANKS,), setting.device.type), [Shard(0)])

    tensors = {
        "plain": local,
        "ours": mw.shard_tensor(whole, mesh, [mw.Shard(0)]),
        "DTensor": attempt(theirs),
    }
    calls = {name: x if isinstance(x, str) else (lambda x=x: x + x) for name, x in tensors.items()}
    return _measured(calls, setting)


def _measured(calls: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the times of the functions, and the errors of those that could not be made."""
    works = {name: call for name, call in calls.items() if not isinstance(call, str)}
    errors = {name: text for name, text in calls.items() if isinstance(text, str)}
    ms = in_turns_ms(works, setting, turns=5 if setting.quick else 15)
    return {"ms": ms, "ratio to plain": ratios(ms, "plain"), **({"errors": errors} if errors else {})}


if __name__ == "__main__":
    main_of(eager)
