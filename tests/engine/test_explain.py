"""The output of `explain`, as golden texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import meshwright as mw

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])

BLOCK = """\
call    operand           becomes            by                       bytes  result
linear  f32[4@dp, 8]      f32[4@dp, 8] ~tp   gradient: AllReduce(tp)      0  f32[4@dp, 16@tp]
        f32[16@tp, 8]     f32[16@tp, 8] ~dp  gradient: AllReduce(dp)      0
gelu    f32[4@dp, 16@tp]                                                     f32[4@dp, 16@tp]
linear  f32[4@dp, 16@tp]                                                     f32[4@dp, 8] +tp
        f32[8, 16@tp]     f32[8, 16@tp] ~dp  gradient: AllReduce(dp)      0
rank 0: no communication, 0 bytes received"""

RESHARDS = """\
call operand becomes by bytes result
reshard f32[4@dp, 8@tp] f32[4@dp, 8] AllGather(tp, dim 1) 32 f32[4@dp, 8]
reshard f32[4@dp, 8@tp] f32[4@x, 8] on ProcessMesh([x=2], ranks=[4, 5]) \
Exchange(f32[4@x, 8] on ProcessMesh([x=2], ranks=[4, 5])) 0 f32[4@x, 8]
rank 0: 1 all_gather, 1 exchange, 32 bytes received"""


def block() -> torch.Tensor:
    x = mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0)])
    up = mw.shard_tensor(torch.ones(16, 8), MESH, [mw.Replicate(), mw.Shard(0)])
    down = mw.shard_tensor(torch.ones(8, 16), MESH, [mw.Replicate(), mw.Shard(1)])
    return F.linear(F.gelu(F.linear(x, up)), down)


def test_a_tensor_parallel_block_keeps_its_sum_pending() -> None:
    assert str(mw.explain(block)) == BLOCK


def test_an_explicit_reshard_is_in_the_table() -> None:
    there = mw.ProcessMesh([4, 5], ["x"])

    def program() -> None:
        x = mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0), mw.Shard(1)])
        mw.reshard(x, placements=[mw.Shard(0)])
        mw.reshard(x, there, [mw.Shard(0)])

    lines = str(mw.explain(program)).splitlines()
    assert [" ".join(line.split()) for line in lines] == RESHARDS.splitlines()


def test_backward_passes_and_values_are_counted() -> None:
    def program() -> float:
        x = mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0)])
        w = mw.shard_tensor(torch.ones(8, 8), MESH, [], requires_grad=True)
        loss = (x @ w).sum()
        loss.backward()
        assert w.grad is not None
        return loss.item()

    for found in mw.simulate(lambda: mw.explain(program), 4):
        assert found.result == 256.0
        assert found.collectives == {"all_reduce": 2}  # the gradient of w, the value of the loss
        assert found.received == 8 * 8 * 4 + 4


def test_a_plain_operand_and_one_without_a_rule_are_named() -> None:
    def program() -> None:
        x = mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0)])
        torch.matmul(torch.ones(4, 4), x)

    text = str(mw.explain(program))
    assert "f32[4, 4] (plain)" in text
    assert "Slice(dp, dim 1)" in text


def test_each_rank_explains_all_its_own_plans() -> None:
    """A rank that is done must not give the others plans before they have explained theirs."""

    def go() -> list[str]:
        x = mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0), mw.Partial()])
        found = mw.explain(lambda: torch.relu(x).exp().sum())
        torch.relu(x).exp().sum()
        return [call.name for call in found.calls]

    assert mw.simulate(go, 4) == [["relu", "exp", "sum"]] * 4


def test_a_mesh_of_sixteen_thousand_ranks_is_explained() -> None:
    def program() -> torch.Tensor:
        mesh = mw.ProcessMesh(torch.arange(16384).reshape(2048, 8).numpy(), ["dp", "tp"])
        x = mw.shard_tensor(torch.empty(2048, 8, device="meta"), mesh, [mw.Shard(0), mw.Shard(1)])
        w = mw.shard_tensor(torch.empty(8, 4, device="meta"), mesh, [mw.Replicate(), mw.Shard(0)])
        return torch.relu(x @ w)

    assert str(mw.explain(program).calls[1].moves[0][1].plan) == "AllReduce(tp)"


def test_the_operand_that_is_resharded_is_shown() -> None:
    def program() -> torch.Tensor:
        a, b = (mw.shard_tensor(torch.ones(2, 4, 8), MESH, [mw.Shard(1)]) for _ in range(2))
        return torch.einsum("bsd,btd->bst", a, b)

    _, first, second, *_ = str(mw.explain(program)).splitlines()
    assert ("AllGather" in first, "AllGather" in second) == (False, True)
