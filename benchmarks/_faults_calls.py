"""Rows 15, 16 and 21: ranks whose calls differ from those of their peers, or use other values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._fault_runs import Ended, Verdict, mark_fault, run_ranks

HIDDEN, BATCH, STEPS = 16, 8, 4
RIGHT, DISAGREES = "no fault was told", "DisagreementError"


class Blocks(nn.Module):
    """Four equal layers; a rank may run them in another order."""

    def __init__(self, order: Sequence[int], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.order, self.activation = order, activation

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = self.activation(self.layers[at](x))
        return x


def train(folder: str, case: str) -> None:
    """Train one rank; `case` selects the deviation of rank 1."""
    rank = mw.init_process().rank
    other = case if rank == 1 else ""
    if "version" in other:
        torch.__version__ = "2.11.0"
    torch.manual_seed(1 if "seed" in other else 0)
    tensor_parallel = case.startswith("tp")
    mesh = mw.init_mesh(tp=2) if tensor_parallel else mw.init_mesh(dp=2)
    order = [0, 2, 1, 3] if "layers" in other else [0, 1, 2, 3]
    model = Blocks(order, torch.sigmoid if "code" in other else torch.tanh)
    if "parameters" in other:
        with torch.no_grad():
            next(model.parameters()).add_(1e-6)
    for layer in model.layers:
        weight = [mw.Shard(1)] if tensor_parallel else [mw.Replicate()]
        layer.weight = mw.shard_tensor(layer.weight, mesh, weight)
        layer.bias = mw.shard_tensor(layer.bias, mesh, [mw.Replicate()])
    mark_fault(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if "rate" in other else 0.1)
    torch.manual_seed(2 if "batch" in other else 0)
    data = mw.shard_tensor(torch.randn(BATCH, HIDDEN), mesh, [mw.Replicate() if tensor_parallel else mw.Shard(0)])
    if "static" in case:
        _train_static(model, data, optimizer, mesh)
        return
    for step in range(STEPS):
        loss = _loss(model, data, other)
        optimizer.zero_grad()
        if not ("backward" in other and step == 1):
            loss.backward()
        if not ("step" in other and step == 1):
            optimizer.step()
        _read(model, other)


def _train_static(model: nn.Module, data: Tensor, optimizer: torch.optim.Optimizer, mesh: mw.ProcessMesh) -> None:
    step = mw.to_static(model, None, nn.functional.mse_loss, optimizer)
    print([float(step(data, data)) for _ in range(STEPS)])


def _loss(model: nn.Module, data: Tensor, other: str) -> Tensor:
    out = model(data)
    loss = (out.abs() if "operator" in other else out**2).sum(0)
    return loss.amax() if "reduction" in other else loss.sum()


def _read(model: Blocks, other: str) -> None:
    """Read two gradients, one after the other."""
    order = (1, 0) if "swapped" in other else (0, 1)
    for at in order:
        mw.unshard_dtensor([*model.parameters()][2 * at] * 2)


CASES = (
    *("tp layers", "dp layers", "tp swapped", "dp operator", "tp operator", "dp reduction"),
    *("tp static layers", "dp static layers"),
)
SETTINGS = (
    *("dp version", "dp seed", "dp rate", "dp parameters", "dp code", "tp version", "tp rate", "tp code"),
    *("tp seed", "tp parameters", "tp static seed"),
    *("dp static version", "dp static seed", "dp static rate", "tp static code"),
)
SKIPS = ("dp backward", "dp step", "tp step")


def _all_raised(cases: Sequence[str], told: Callable[[Ended], bool]) -> Verdict:
    """Return a verdict on cases in which both ranks should end with an error."""
    missed: list[str] = []
    times: list[float] = []
    for case in cases:
        ended = run_ranks("benchmarks._faults_calls:train", 2, arguments=[case], limit=120.0)
        times += [e.seconds for e in ended]
        if not all(e.status > 0 and told(e) for e in ended):
            missed.append(case)
    text = f"{len(cases) - len(missed)} of {len(cases)} reported" + (f"; silent: {', '.join(missed)}" if missed else "")
    return Verdict(not missed, text, max(times))


def another_plan() -> Verdict:
    """A rank runs another plan: an error is raised before a result of the other calls is used."""
    return _all_raised(CASES, lambda e: DISAGREES in e.output)


def skipped() -> Verdict:
    """A rank skips one call, or one step: an error is raised within the step."""
    return _all_raised(SKIPS, lambda e: "Error" in e.output)


def other_settings() -> Verdict:
    """Ranks have other versions, settings, seeds, rates, code, parameters or data: refused with a table."""
    return _all_raised(SETTINGS, lambda e: DISAGREES in e.output or "ReplicaError" in e.output)


ROWS: dict[int, Callable[[], Verdict]] = {15: another_plan, 16: skipped, 21: other_settings}

if __name__ == "__main__":
    for ended in run_ranks("benchmarks._faults_calls:train", 2, arguments=[sys.argv[1]], limit=120.0):
        print(f"--- rank {ended.rank}: status {ended.status} after {ended.seconds} s\n{ended.output[-1500:]}")
