"""Communication of programs equals the golden texts, and unused communication is removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.communications import CASES, GOLDEN, Case

from .programs import MLP, counted, mesh_of, mlp_batch, placed, step_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_communication_of_a_program_equals_its_golden_text(case: Case) -> None:
    """`from benchmarks.communications import write; write()` writes the texts again."""
    assert case.text() == (GOLDEN / f"{case.name}.txt").read_text()


def test_there_is_a_program_for_each_text() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {case.name for case in CASES}


class Wasteful(nn.Module):
    """A model that gathers an unused tensor, and sends an unused one to another mesh."""

    def __init__(self, mesh: mw.ProcessMesh, elsewhere: mw.ProcessMesh | None) -> None:
        super().__init__()
        self.mesh, self.elsewhere, self.mlp = mesh, elsewhere, MLP(mesh)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = mw.reshard(x, self.mesh, placed(self.mesh, dp=0))
        mw.reshard(torch.tanh(x), self.mesh, placed(self.mesh)).square()
        if self.elsewhere is not None:
            mw.reshard(x * 2, self.elsewhere, placed(self.elsewhere))
        return self.mlp(x, y)


def test_unused_collectives_are_removed() -> None:
    """All ranks of a mesh have the same program, so all of them remove the same collectives."""
    mesh = mesh_of(dp=2)
    step = step_of(lambda: Wasteful(mesh, None), mlp_batch(), 2)
    assert [counted(p) for p in step.programs] == [{"AllReduce(dp)": 5}] * 2


def test_exchanges_with_other_meshes_stay() -> None:
    here, there = mw.ProcessMesh([0, 1], ["dp"]), mw.ProcessMesh([2, 3], ["dp"])
    step = step_of(lambda: Wasteful(here, there), mlp_batch(), 4)
    sends = [[n for n in p.nodes if "Exchange" in repr(n.op) and n.origin.phase == "forward"] for p in step.programs]
    assert [len(found) for found in sends] == [1, 1, 1, 1]
