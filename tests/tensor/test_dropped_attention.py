"""Attention with dropout from counters runs in blocks of rows, with the numbers of single operators on every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.spmd.forms import block_tiles
from meshwright.tensor.handlers import random_functions

from ..spmd.test_attention_tiles import Largest

CASES = {
    "all": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.arange(144).view(12, 12) % 5 > 0},
    "float mask": {"attn_mask": torch.arange(288.0).view(2, 1, 12, 12) % 7 / 4},
    "one row": {"attn_mask": torch.arange(24).view(2, 1, 1, 12) % 3 > 0},
    "one column": {"attn_mask": torch.arange(12).view(12, 1) % 3 > 0},
    "scale": {"scale": 0.3},
    "shared": {"enable_gqa": True, "is_causal": True},
}
PLACEMENTS: dict[str, Sequence[mw.Shard | mw.Replicate]] = {
    "batch": [mw.Shard(0)],
    "batch and heads": [mw.Shard(0), mw.Shard(1)],
    "sequence": [mw.Replicate(), mw.Shard(2)],
    "heads and sequence": [mw.Shard(1), mw.Shard(2)],
    "replicated": [mw.Replicate()],
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tiles, "ROWS_AT_ONCE", 4)


def square() -> mw.ProcessMesh:
    return mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "cp"])


def attended(case: str, placements: Any, name: Any = "gather", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the result and the gradients, whole; the second random number checks the state of the generator."""
    torch.manual_seed(0)
    options = dict(CASES[case])
    shapes = [(2, heads, 12, 8) for heads in (4, *(2 if case == "shared" else 4,) * 2)]
    qkv = [mw.shard_tensor(torch.randn(s).to(dtype), square(), placements).requires_grad_() for s in shapes]
    with mw.random_source("counter"), mw.context_parallel(name):
        out = F.scaled_dot_product_attention(*qkv, dropout_p=0.3, **options)
        (out * torch.arange(8.0)).sum().backward()
    found = [out, *(x.grad for x in qkv)]
    return [*(mw.unshard_dtensor(x).detach() for x in found if x is not None), torch.rand(1)]


@pytest.mark.parametrize("case", CASES)
def test_blocks_have_the_numbers_of_single_operators(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(random_functions, "_runs_in_blocks", lambda *_: False)
        goal = mw.simulate(attended, 4, case, PLACEMENTS["replicated"])[0]
    for placements in PLACEMENTS.values():
        for name in ("gather", "ring"):
            for found in mw.simulate(attended, 4, case, placements, name):
                torch.testing.assert_close(found, goal, rtol=1e-4, atol=1e-5)


def test_the_dtype_is_kept() -> None:
    goal = mw.simulate(attended, 4, "causal", PLACEMENTS["sequence"], "ring", torch.float32)[0]
    found = mw.simulate(attended, 4, "causal", PLACEMENTS["sequence"], "ring", torch.bfloat16)[0]
    for x, wanted in zip(found[:-1], goal, strict=False):
        assert x.dtype == torch.bfloat16
        assert (x - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.mark.parametrize("name", ["gather", "ring"])
def test_no_rank_holds_all_weights(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor grows with the length, not with its square."""
    monkeypatch.setattr(block_tiles, "ROWS_AT_ONCE", 16)

    def largest(length: int) -> int:
        x = mw.shard_tensor(torch.ones(1, 1, length, 4), mw.ProcessMesh([0, 1], ["cp"]), [mw.Shard(2)]).requires_grad_()
        with mw.random_source("counter"), mw.context_parallel(name), Largest() as found:
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True).sum().backward()
        return found.elements

    for short, long in zip(mw.simulate(largest, 2, 256), mw.simulate(largest, 2, 512), strict=True):
        assert long <= 2 * short


def dropped(shapes: Sequence[tuple[int, ...]], ranks: int, name: Any = "ring", **options: Any) -> list[Tensor]:
    """Return the result and the gradients of sharded sequences, whole."""
    torch.manual_seed(0)
    mesh = mw.ProcessMesh(range(ranks), ["cp"])
    qkv = [mw.shard_tensor(torch.randn(s), mesh, [mw.Shard(2)]).requires_grad_() for s in shapes]
    with mw.random_source("counter"), mw.context_parallel(name):
        out = F.scaled_dot_product_attention(*qkv, **options)
        (out * 3).sum().backward()
    return [mw.unshard_dtensor(x).detach() for x in (out, *(x.grad for x in qkv)) if x is not None]


@pytest.mark.parametrize("shapes", [[(1, 2, 2, 4)] * 3, [(2, 2, 4, 4), (2, 2, 4, 4), (1, 2, 4, 4)]], ids=str)
@pytest.mark.parametrize("name", ["gather", "ring"])
def test_ranks_without_rows_and_broadcast_values(shapes: Any, name: Any) -> None:
    goal = mw.simulate(dropped, 1, shapes, 1, name, dropout_p=0.3)[0]
    for found in mw.simulate(dropped, 3, shapes, 3, name, dropout_p=0.3):
        torch.testing.assert_close(found, goal)


def test_all_weights_may_be_dropped() -> None:
    for found in mw.simulate(dropped, 2, [(1, 2, 4, 4)] * 3, 2, dropout_p=1.0):
        assert not any(x.count_nonzero() for x in found)


@pytest.mark.parametrize("options", [{"dropout_p": 1.5}, {"dropout_p": 0.5, "is_causal": True}], ids=str)
def test_calls_that_torch_refuses_are_refused(options: dict[str, Any]) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises((ValueError, mw.tensor.OperationError), match=r"between 0 and 1|attn_mask should not be set"):
        mw.simulate(dropped, 2, [(1, 2, 4, 4)] * 3, 2, attn_mask=mask, **options)


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.gain).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True).square().mean()


@pytest.mark.parametrize("name", ["gather", "ring"])
def test_static_equals_eager(name: Any) -> None:
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))

    def losses(static: bool) -> list[float]:
        torch.manual_seed(0)
        net = Attend()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        mw.parallelize(net, optimizer, mw.ProcessMesh([0, 1], ["cp"]), mw.Parallelism(context=name))
        found: list[float] = []
        with mw.random_source("counter"):
            step = mw.to_static(net, None, None, optimizer) if static else None
            for _ in range(3):
                loss = net(x) if step is None else step(x)
                if step is None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss.item())
        return found

    eager, static = (mw.simulate(losses, 2, way) for way in (False, True))
    assert len(set(eager[0])) == 3
    for found in (*eager, *static):
        assert found == pytest.approx(eager[0], rel=1e-5)
