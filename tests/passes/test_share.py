"""Equal nodes become one, if that is safe."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Conversion
from meshwright.passes import Linear, Regather, Share

from .programs import MLP, after, bare, counted, llama, llama_with, mesh_of, mlp, mlp_batch, placed, step_of


class Twice(nn.Module):
    """A weight that is stored sharded, and gathered for each half of the batch."""

    def __init__(self, mesh: mw.ProcessMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        self.weight = nn.Parameter(mw.shard_tensor(torch.randn(8, 4), mesh, placed(mesh, dp=0)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = [self.loss(*part) for part in zip(x.chunk(2), y.chunk(2), strict=True)]
        return (losses[0] + losses[1]) / 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (mw.reshard(t, self.mesh, placed(self.mesh, dp=0)) for t in (x, y))
        return F.mse_loss(torch.tanh(x @ mw.reshard(self.weight, self.mesh, placed(self.mesh))), y)


def twice() -> Any:
    mesh = mesh_of(dp=2)
    return step_of(lambda: Twice(mesh), mlp_batch(), 2)


def test_a_tensor_is_gathered_once() -> None:
    step = twice()
    assert counted(step.programs[0], "forward")["AllGather(dp)"] == 2
    found = after(step, Share())
    assert counted(found.program, "forward")["AllGather(dp)"] == 1
    assert found.is_equal
    assert "AllGather(dp, dim 0) of f32[8@dp, 4] is shared" in found.changes_by("share")[0].what
    assert found.changes_by("share")[0].saved == {"bytes": 64, "rounds": 1}


def test_communication_steps_are_shared_even_if_local_work_is_not() -> None:
    step = twice()
    found = after(step, Share(local=False))
    assert counted(found.program, "forward")["AllGather(dp)"] == 1
    local = sum(not isinstance(node.op, Conversion) for node in step.programs[0].nodes)
    assert sum(not isinstance(node.op, Conversion) for node in found.program.nodes) == local


def test_steps_made_equal_are_shared_after_local_work() -> None:
    """Views of one weight are one value, so the gathers of both views are one."""
    found = after(mlp(dp=2, tp=2), Share())
    assert len(found.program.nodes) <= len(mlp(dp=2, tp=2).programs[0].nodes)
    assert found.is_equal


def test_phases_keep_their_own_gathers_by_default() -> None:
    step = llama_with(stage=3, dp=2)
    twelve, again = after(step, Regather()), after(step, Regather(), Share())
    assert twelve.counts["AllGather(dp)"] == again.counts["AllGather(dp)"] == 23
    assert after(step, Regather(), Share(phases=True)).counts["AllGather(dp)"] == 12
    assert again.is_equal


def test_nothing_of_a_llama_is_sent_twice() -> None:
    found = after(llama(layers=1, dp=2, tp=2), Share(phases=True))
    assert found.counts == counted(llama(layers=1, dp=2, tp=2).programs[0])
    assert found.is_equal


def test_equal_states_stay_separate_tensors() -> None:
    """The first step makes equal states; later eager steps write to each of them."""

    def train(passes: tuple[Any, ...]) -> list[Tensor]:
        model = MLP(mesh_of(dp=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        static = mw.to_static(model, None, None, optimizer, strategy=bare(*passes))
        static(*mlp_batch())
        model(*mlp_batch()).backward()
        optimizer.step()
        return [p.to_local().detach().clone() for p in model.parameters()]

    plain, shared = (mw.simulate(lambda p=passes: train(p), 2) for passes in ((), (Share(), Linear())))
    for a, b in zip(plain, shared, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
