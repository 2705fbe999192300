"""A model without a mark: the mesh and the cuts are found, and the numbers are those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._static_models import SUBJECTS, Subject
from meshwright.cost import Cluster, cluster_of
from meshwright.models import Llama, LlamaConfig
from meshwright.search import MeshPlan, SearchError

STEPS = 3


def alone(subject: Subject) -> list[float]:
    """The losses of one device."""
    torch.manual_seed(0)
    model = subject.make().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for seed in range(STEPS):
        inputs, wanted = subject.batch(seed)
        loss = model(inputs, wanted) if subject.loss is None else subject.loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def machines(memory: float) -> Cluster:
    """Cores with so many bytes each."""
    usual = cluster_of("cpu core")
    return replace(usual, device=replace(usual.device, memory=memory))


@pytest.mark.parametrize("name", ["mlp", "llama", "bert", "moe"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_chosen_plan_gives_the_numbers_of_one_device(name: str, ranks: int) -> None:
    subject = SUBJECTS[name]

    def on_rank() -> tuple[list[float], MeshPlan]:
        torch.manual_seed(0)
        model = subject.make().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.auto(model, subject.batch(0), subject.loss, optimizer, cluster=machines(4e9))
        step.train()
        model.eval()
        assert step.plan is not None
        return [step(*subject.batch(seed)).item() for seed in range(STEPS)], step.plan

    wanted = alone(subject)
    for losses, plan in mw.simulate(on_rank, ranks):
        assert plan.dp * plan.tp == ranks
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_little_memory_shares_a_model_out() -> None:
    def on_rank() -> tuple[list[float], MeshPlan, list[int]]:
        torch.manual_seed(0)
        subject = SUBJECTS["llama"]
        model = subject.make().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.auto(model, subject.batch(0), None, optimizer, cluster=machines(memory=200e3))
        model.eval()
        losses = [step(*subject.batch(seed)).item() for seed in range(STEPS)]
        assert step.plan is not None
        return losses, step.plan, [p.to_local().numel() for p in model.parameters() if isinstance(p, mw.DistTensor)]

    wanted = alone(SUBJECTS["llama"])
    whole = sum(p.numel() for p in SUBJECTS["llama"].make().parameters())
    for losses, plan, parts in mw.simulate(on_rank, 4):
        assert plan.tp > 1
        assert sum(parts) < 0.7 * whole
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_a_plan_needs_no_devices() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=32000, hidden=4096, layers=2, heads=32, kv_heads=8, feed_forward=14336))
        batch = [torch.empty(64, 2048, dtype=torch.long) for _ in range(2)]
    found = mw.plan(model, batch, cluster="64xH100, 8 per node, 400G")
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert all(p.dp * p.tp == 64 for p in found)
    assert "replicas" in str(found[0])
    with pytest.raises(SearchError, match="GB are missing"):
        mw.plan(model, batch, cluster="1xV100-1G")


def test_a_batch_that_nothing_divides_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Any:
            return (x @ self.w).sum()

    found = mw.plan(Odd(), [torch.ones(5, 3)], cluster="4xA100")
    assert [(p.dp, p.tp) for p in found] == [(1, 4)]
