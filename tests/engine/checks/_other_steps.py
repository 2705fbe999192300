"""Static steps on two ranks, of which rank 1 makes another step.

Inductor's kernels are replaced by the graph that would be compiled, whose communication is the same custom operators.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import DisagreementError

inductor: Any = import_module("meshwright.graph.execution.inductor")
Batch = tuple[Tensor, Tensor]
KINDS = ("kernels", "1F1B", "PipeDream with kernels")


def batch(at: int) -> Batch:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(at))
    return x, x[:, :1]


def static(kind: str, rate: float = 0.1) -> tuple[nn.Module, mw.DistModel]:
    """Return a model, and its static step of the kind."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    options: dict[str, Any] = {"compiler": "inductor"} if "kernels" in kind else {}
    if kind == "kernels":
        mw.shard_layer(net, mw.ProcessMesh([0, 1], ["tp"]), _columns)
    else:
        mw.split_pipeline(net, mw.ProcessMesh([0, 1], ["pp"]), at=["2"])
        schedule = kind.split()[0]
        options["pipeline"] = {
            "enable": True,
            "schedule_mode": schedule,
            "accumulate_steps": 4,
            "asynchronous": schedule == "PipeDream",
        }
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    return net, mw.to_static(net, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(**options))


def _columns(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if name == "2" and isinstance(layer, nn.Linear):
        layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Shard(0)])


def other_rate(kind: str, other: bool) -> dict[str, Any]:
    net, step = static(kind, rate=0.2 if other else 0.1)
    return tried(net, step, 0)


def other_batch(kind: str, other: bool) -> dict[str, Any]:
    net, step = static(kind)
    return tried(net, step, 2 if other else 1)


def one_step_more(kind: str, other: bool) -> dict[str, Any]:
    net, step = static(kind)
    if other:
        step._runs += 1
    return tried(net, step, 0)


CASES = (other_rate, other_batch, one_step_more)


def tried(net: nn.Module, step: mw.DistModel, at: int) -> dict[str, Any]:
    """Return the error of a step, and whether the parameters are unchanged."""
    before, error = _kept(net), ""
    try:
        step(*batch(at))
    except DisagreementError as found:
        error = str(found)
    return {"error": error, "is as before": _kept(net) == before}


def _kept(net: nn.Module) -> list[Any]:
    return [(x.to_local() if isinstance(x, mw.DistTensor) else x).tolist() for x in net.state_dict().values()]


def results() -> dict[str, Any]:
    """Return the result of each kind of step in each case."""
    compile_graph = inductor.compile_graph
    inductor.compile_graph = lambda module, *_: module
    try:
        return {f"{kind}: {case.__name__}": case(kind, mw.get_rank() == 1) for kind in KINDS for case in CASES}
    finally:
        inductor.compile_graph = compile_graph
