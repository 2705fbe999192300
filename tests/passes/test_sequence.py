"""Sequence parallelism: other layouts, the same training."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Program
from meshwright.passes import Bucket, SequenceParallel

from .programs import CLOSE, bare, counted, llama_batch, marked_llama, mesh_of, placed

CUT = (SequenceParallel("tp"),)


def trained(make: Any, batch: Any, ranks: int, *passes: Any, steps: int = 2) -> tuple[list[float], Any, Program]:
    """Return the losses, the parameters of all ranks, and the program of rank 0."""

    def rank() -> Any:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        static = mw.to_static(model, None, None, optimizer, strategy=bare(*passes))
        losses = [static(*batch).item() for _ in range(steps)]
        return losses, [p.to_local().detach().clone() for p in model.parameters()], static.program

    found = mw.simulate(rank, ranks)
    return found[0][0], [p for _, ps, _ in found for p in ps], found[0][2]


@cache
def llama(layers: int, cut: bool, tp: int, dp: int = 1, pp: int = 1) -> Any:
    mesh = mesh_of(pp=pp, dp=dp, tp=tp)
    return trained(lambda: marked_llama(mesh, layers), llama_batch(), mesh.size, *(CUT if cut else ()))


@pytest.mark.parametrize("axes", [{"tp": 2, "dp": 2}, {"tp": 3}, {"tp": 2, "pp": 2}], ids=str)
def test_a_llama_has_the_same_training(axes: dict[str, int]) -> None:
    """Three ranks hold 3, 3 and 2 of 8 positions."""
    layers = axes.get("pp", 1)
    (losses, plain, _), (cut_losses, cut, program) = (llama(layers, cut, **axes) for cut in (False, True))
    assert losses == pytest.approx(cut_losses, abs=CLOSE)
    assert all(torch.allclose(a, b, rtol=0, atol=CLOSE) for a, b in zip(plain, cut, strict=True))
    assert counted(program)["ReduceScatter(tp)"] > 0


def test_each_block_gathers_and_scatters_twice_in_each_pass() -> None:
    one, two = (llama(layers, True, tp=2)[2] for layers in (1, 2))
    for phase in ("forward", "backward"):
        a, b = counted(one, phase), counted(two, phase)
        grown = {k: b[k] - a[k] for k in b if b[k] != a[k]}
        norms = {"AllReduce(tp)": 2} if phase == "backward" else {}
        assert grown == {"ReduceScatter(tp)": 2, "AllGather(tp)": 2} | norms


class Block(nn.Module):
    """GPT-style: biases, layer norms, learned positions, dropout on the residual stream."""

    def __init__(self, mesh: mw.ProcessMesh) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.place = nn.Parameter(torch.randn(6, 8))
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)
        self.drop = nn.Dropout(0.25)
        for layer, dim in ((self.up, 0), (self.down, 1), (self.embed, 0)):
            layer.weight = mw.shard_tensor(layer.weight, mesh, placed(mesh, tp=dim))
        self.up.bias = mw.shard_tensor(self.up.bias, mesh, placed(mesh, tp=0))
        mw.shard_layer(self, mesh)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.place)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), targets.flatten())


def test_biases_positions_and_dropout_are_right() -> None:
    """Dropout draws for its part of the sequence the numbers of one device."""
    mesh = mesh_of(tp=2)
    batch = tuple(torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    plain, cut = (trained(lambda: Block(mesh), batch, 2, *passes) for passes in ((), CUT))
    assert plain[0] == pytest.approx(cut[0], abs=CLOSE)
    assert all(torch.allclose(a, b, rtol=0, atol=CLOSE) for a, b in zip(plain[1], cut[1], strict=True))
    assert counted(cut[2], "forward")["ReduceScatter(tp)"] == 2


def test_the_program_has_the_record() -> None:
    told = [c for c in llama(1, True, tp=2)[2].changes if c.by == "sequence_parallel"]
    assert [c.what.split(" after ")[0].split(" before ")[0] for c in told] == ["sharded along the sequence"] * 3 + [
        "gathered"
    ] * 3
    assert told[0].saved == {"bytes": 2048}


def test_models_without_tensor_parallel_layers_stay() -> None:
    mesh = mesh_of(pp=1, dp=2, tp=1)
    program = trained(lambda: marked_llama(mesh, 1), llama_batch(), 2, SequenceParallel("dp"), Bucket(), steps=1)[2]
    assert counted(program) == {"AllReduce(dp)": 2}
