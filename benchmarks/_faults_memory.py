"""Row 24: plans that do not fit into memory, and ranks that run out of it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import meshwright as mw
from benchmarks._fault_runs import Verdict, mark_fault, run_ranks
from meshwright.cost import cluster_of
from meshwright.errors import SearchError

MIB = 2**20


def run_out(folder: str) -> None:
    """Train one rank; rank 1 may use no more memory than it has."""
    rank = mw.init_process().rank
    mesh = mw.init_mesh(dp=2)
    x = mw.shard_tensor(torch.ones(8, 8), mesh, [mw.Shard(0)])
    assert x.sum().item() == 64
    mark_fault(folder)
    if rank == 1:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (held + 64 * MIB, held + 64 * MIB))
    y = mw.shard_tensor(torch.ones(8, 8), mesh, [mw.Shard(0)]) * 2
    if rank == 1:
        kept = [torch.ones(64 * MIB) for _ in range(64)]
        print(len(kept))
    print(y.sum().item())


def _refused() -> str:
    """Return the error about a model that does not fit on any plan; "" if there is none."""
    net = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.randn(8, 4096), torch.randn(8, 4096)
    known = cluster_of("H100")
    cluster = replace(known, device=replace(known.device, memory=32e6))
    try:
        mw.simulate(lambda: mw.auto(net, [batch], nn.functional.mse_loss, optimizer, cluster=cluster), 2)
    except SearchError as error:
        return str(error)
    return ""


def no_memory() -> Verdict:
    """A plan beyond the memory is refused with the largest tensors; a real lack of memory ends all ranks cleanly."""
    ended = run_ranks("benchmarks._faults_memory:run_out", 2, limit=120.0)
    clean = all(e.status > 0 and "Error" in e.output for e in ended)
    text = _refused()
    named = "largest whole tensors" in text and "[16384, 4096]" in text
    return Verdict(
        clean and named,
        f"both ranks ended with an error: {clean}; tensors named: {named}",
        max(e.seconds for e in ended),
    )


ROWS: dict[int, Callable[[], Verdict]] = {24: no_memory}
