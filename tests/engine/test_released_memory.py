"""Memory is released as soon as it is unused, without Python's garbage collector, and sequences are gathered again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

TENSOR = {"work.up": mw.ColwiseParallel(), "work.down": mw.RowwiseParallel()}
SEQUENCE = {"norm": mw.SequenceParallelEnable(), "work": mw.SequenceParallelDisable(), **TENSOR}


class Work(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.up, self.down, self.written = nn.Linear(8, 16), nn.Linear(16, 8), written

    def forward(self, x: Tensor) -> Tensor:
        self.took = weakref.ref(x)
        if self.written:
            x.mul_(2)
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self, written: bool = False) -> None:
        super().__init__()
        self.norm, self.work = nn.LayerNorm(8), Work(written)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(self.norm(x) * 1)


def block(plan: Mapping[str, Any], written: bool = False) -> Block:
    torch.manual_seed(0)
    found = Block(written)
    mw.parallelize(found, None, mw.ProcessMesh([0, 1], ["tp"]), mw.Parallelism(plan))
    return found


@pytest.fixture
def uncollected() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("plan", [TENSOR, SEQUENCE], ids=["tensor", "sequence"])
def test_a_backward_pass_releases_all_activations(plan: Mapping[str, Any]) -> None:
    def go() -> bool:
        made = block(plan)
        made(torch.ones(2, 4, 8)).square().mean().backward()
        return made.work.took() is None

    assert mw.simulate(go, 2) == [True, True]


@pytest.mark.usefixtures("uncollected")
def test_a_forward_pass_keeps_only_parts_of_sequences() -> None:
    def go() -> bool:
        made = block(SEQUENCE)
        loss = made(torch.ones(2, 4, 8)).square().mean()
        return made.work.took() is None and loss.requires_grad

    assert mw.simulate(go, 2) == [True, True]


@pytest.mark.parametrize("written", [False, True])
def test_the_gradients_are_those_of_one_device(written: bool) -> None:
    """Also if the module writes to its input, which is then kept."""

    def gradients(plan: Mapping[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(0)
        made = Block(written) if plan is None else block(plan, written)
        made(torch.arange(64.0).reshape(2, 4, 8).cos()).square().mean().backward()
        return [mw.unshard_dtensor(p.grad) if plan else p.grad for p in made.parameters()]

    wanted = gradients(None)
    for found in mw.simulate(lambda: gradients(SEQUENCE), 2):
        torch.testing.assert_close(found, wanted)
