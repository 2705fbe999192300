"""Part of `gpu`: a training step of a Llama of a billion parameters: ours, FSDP2 in a process group of one, and the
prediction of the cost model.

All contenders have the same weights in bfloat16, the same batch, and torch's fused AdamW. `dp x tp` are four simulated
ranks on the one device, which share its time. Contenders are measured one after the other, because together they do not
fit.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.cost import cluster, name_of_device
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.search import Plan, Transformer, predict

from ._gpu_device import Setting, attempt, main_of, ratios

DTYPE = torch.bfloat16
LAYERS = 8
MESH = (1, 2, 2)
STEPS, TURNS = 2, 5
TOLERANCE = 0.02


def llama(setting: Setting) -> dict[str, Any]:
    """Return seconds, tokens per second and GiB of each contender, and the prediction."""
    config, batch, sequence = _sizes(setting)
    torch.manual_seed(0)
    model = Llama(config).to(setting.device, DTYPE)
    tokens, targets = torch.randint(0, config.vocab, (2, batch, sequence)).to(setting.device)
    rows = {
        name: attempt(lambda s=steps: _row(s, model, (tokens, targets), setting))
        for name, steps in CONTENDERS.items()
        if not (setting.quick and name in SLOW)
    }
    losses = {name: row["losses"] for name, row in rows.items() if isinstance(row, dict)}
    seconds = {name: row["seconds"] for name, row in rows.items() if isinstance(row, dict)}
    return {
        "sizes": {"parameters": sum(p.numel() for p in model.parameters()), "tokens": batch * sequence},
        "rows": rows,
        "ratio to ours": ratios(seconds, "ours") if "ours" in seconds else {},
        "equal losses": {name: _near(found, losses.get("eager", found)) for name, found in losses.items()},
        "prediction": attempt(lambda: _prediction(config, batch, sequence, seconds, setting)),
    }


def _sizes(setting: Setting) -> tuple[LlamaConfig, int, int]:
    if not setting.is_large:
        return LlamaConfig(64, 32, 2, 4, 2, 48), 4, 16
    return LlamaConfig(128256, 2048, LAYERS, 32, 8, 8192), 4, 2048


def _near(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True))


Step = Callable[[Tensor, Tensor], Tensor]


def _row(make: Callable[..., dict[str, Any]], model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> Any:
    gc.collect()
    setting.reset_peak()
    found = make(model, batch, setting)
    found["peak GiB"] = setting.peak_gib()
    found["tokens/s"] = round(batch[0].numel() / found["seconds"], 1)
    return found


def _measured(step: Step, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    """Return the median seconds of a step, of the first step, and the losses of the first steps."""
    start = time.perf_counter()
    losses = [float(step(*batch))]
    first = time.perf_counter() - start
    losses += [float(step(*batch)) for _ in range(STEPS)]
    setting.finish()
    times: list[float] = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step(*batch)
        setting.finish()
        times.append((time.perf_counter() - start) / STEPS)
    return {"seconds": round(median(times), 5), "first step s": round(first, 2), "losses": losses}


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)


def _eager_step(model: torch.nn.Module) -> Step:
    optimizer = _optimizer(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _eager(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    return _measured(_eager_step(copy.deepcopy(model)), batch, setting)


def _static_step(model: Llama, compiler: str) -> Step:
    strategy = mw.Strategy.of(compiler=compiler)
    return mw.to_static(model, None, None, _optimizer(model), strategy)


def _ours(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting, compiler: str = "inductor") -> dict[str, Any]:
    def rank() -> dict[str, Any]:
        return _measured(_static_step(copy.deepcopy(model), compiler), batch, setting)

    return mw.simulate(rank, 1)[0]


def _nodes(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    return _ours(model, batch, setting, "none")


def _sharded(model: Llama, setting: Setting) -> Llama:
    own = copy.deepcopy(model)
    mark(own, mw.ProcessMesh(torch.arange(4, device="cpu").view(MESH).tolist(), ["pp", "dp", "tp"]))
    return own


def _dp_tp(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    def rank() -> dict[str, Any]:
        return _measured(_static_step(_sharded(model, setting), "inductor"), batch, setting)

    return mw.simulate(rank, 4)[0]


def _dp_tp_eager(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    def rank() -> dict[str, Any]:
        return _measured(_eager_step(_sharded(model, setting)), batch, setting)

    return mw.simulate(rank, 4)[0]


@contextmanager
def _process_group(setting: Setting) -> Iterator[None]:
    """Make this process the only rank of torch's default process group, inside the context."""
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
        backend = "nccl" if setting.device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _fsdp(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting, compiled: bool = False) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    with _process_group(setting):
        mesh = torch.distributed.init_device_mesh(setting.device.type, (1,))
        own = copy.deepcopy(model)
        for part in (*own.blocks, own):
            fully_shard(part, mesh=mesh)
        if compiled:
            for block in own.blocks:
                block.compile(dynamic=False)
        return _measured(_eager_step(own), batch, setting)


def _fsdp_compiled(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    return _fsdp(model, batch, setting, compiled=True)


def _compiled(model: Llama, batch: tuple[Tensor, Tensor], setting: Setting) -> dict[str, Any]:
    own = copy.deepcopy(model)
    for part in (*own.blocks, own.exit):
        part.compile(dynamic=False)
    return _measured(_eager_step(own), batch, setting)


CONTENDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "eager": _eager,
    "torch.compile": _compiled,
    "ours": _ours,
    "ours, no compiler": _nodes,
    "ours, dp x tp": _dp_tp,
    "ours, dp x tp, eager": _dp_tp_eager,
    "FSDP2": _fsdp,
    "FSDP2, torch.compile": _fsdp_compiled,
}


SLOW = {"ours, dp x tp"}
"""Contenders that take minutes to compile, because each rank has its own program."""


def _prediction(
    config: LlamaConfig, batch: int, sequence: int, seconds: dict[str, float], setting: Setting
) -> dict[str, Any]:
    """Return the predicted seconds on the device, if the cost model knows it, and their ratio to those of ours."""
    reported = str(torch.get_device_module(setting.device.type).get_device_name(setting.device))
    known = name_of_device(reported)
    if known is None:
        return {"device": reported, "seconds": None}
    sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.head_size, config.feed_forward)
    plan = Plan(batch=batch, microbatch=batch, sequence=sequence)
    told = predict(Transformer(*sizes, config.vocab), plan, cluster(f"1x{known}"))
    found = round(float(told.seconds), 5)
    return {"device": known, "seconds": found, "to measured": {k: round(found / s, 3) for k, s in seconds.items()}}


if __name__ == "__main__":
    main_of(llama)
