"""Dropout as in training steps: in attention, of channels, after a sharded product; numbers and bytes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
CASES = [
    {}, {"is_causal": True}, {"mask": "bool"}, {"mask": "float"}, {"scale": 0.3},
    {"keys": 2, "enable_gqa": True, "is_causal": True},
]  # fmt: skip
PLACEMENTS = [
    [mw.Shard(0)], [mw.Shard(0), mw.Shard(1)], [mw.Shard(2)], [mw.Replicate(), mw.Shard(3)], [mw.Shard(1), mw.Shard(2)],
]  # fmt: skip


def attention(case: dict[str, Any], placements: Any = None) -> list[Tensor]:
    """Return the output and three gradients, as whole tensors."""
    torch.manual_seed(0)
    given = dict(case)
    shapes = [(3, heads, 6, 8) for heads in (4, given.get("keys", 4), given.pop("keys", 4))]
    masks = {"bool": torch.rand(6, 6) > 0.6, "float": torch.randn(3, 1, 6, 6)}
    mask = masks.get(given.pop("mask", ""))
    qkv = [torch.randn(shape) for shape in shapes]
    if placements is not None:
        qkv = [mw.shard_tensor(x, MESH, placements) for x in qkv]
    qkv = [x.requires_grad_() for x in qkv]
    torch.manual_seed(1)
    out = F.scaled_dot_product_attention(*qkv, mask, 0.3, **given)
    (out * torch.arange(8.0)).sum().backward()
    return [mw.unshard_dtensor(x).detach() for x in (out, *(x.grad for x in qkv)) if x is not None]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(c) or "plain")
def test_attention_with_dropout_stays_sharded(case: dict[str, Any]) -> None:
    wanted = attention(case)
    for placements in PLACEMENTS:
        with warnings.catch_warnings():
            warnings.simplefilter("error", mw.tensor.RanWholeWarning)
            found = mw.simulate(attention, 4, case, placements)
        for got in found:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placements", [[mw.Shard(0)], [mw.Shard(0), mw.Shard(1)]])
def test_sharding_by_rows_and_heads_needs_no_communication(placements: Any) -> None:
    def go() -> int:
        q = mw.shard_tensor(torch.ones(4, 4, 6, 8), MESH, placements)
        with mw.trace_comm() as trace:
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        return len(trace.calls)

    assert mw.simulate(go, 4) == [0] * 4


def test_attention_with_dropout_under_autocast() -> None:
    def go(mesh: Any) -> Tensor:
        torch.manual_seed(0)
        q = torch.randn(2, 4, 6, 8)
        q = q if mesh is None else mw.shard_tensor(q, mesh, [mw.Shard(0), mw.Shard(1)])
        with torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        return mw.unshard_dtensor(out)

    wanted = go(None)
    assert wanted.dtype == torch.bfloat16
    for got in mw.simulate(go, 4, MESH):
        torch.testing.assert_close(got, wanted)


def test_dropout_reduces_terms_and_keeps_shards() -> None:
    """A product with a weight sharded by rows, followed by dropout: one sum over "tp", nothing over "dp"."""

    def go() -> tuple[list[str], Tensor, tuple[Any, ...]]:
        x = mw.shard_tensor(torch.arange(32.0).reshape(4, 8), MESH, [mw.Shard(0), mw.Shard(1)])
        w = mw.shard_tensor(torch.ones(8, 6), MESH, [mw.Replicate(), mw.Shard(0)])
        torch.manual_seed(0)
        with mw.trace_comm() as trace:
            y = F.dropout(x @ w, 0.5)
        return [call.step for call in trace.calls], mw.unshard_dtensor(y), y.placements

    torch.manual_seed(0)
    wanted = F.dropout(torch.arange(32.0).reshape(4, 8) @ torch.ones(8, 6), 0.5)
    for steps, y, placements in mw.simulate(go, 4):
        assert steps == ["AllReduce(tp)"]
        assert placements == (mw.Shard(0), mw.Replicate())
        torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 6, 5, 3), (4, 6, 2, 2, 3)])
@pytest.mark.parametrize("inplace", [False, True])
def test_channels_are_dropped_on_their_ranks(shape: tuple[int, ...], inplace: bool) -> None:
    drop = {3: F.dropout1d, 4: F.dropout2d, 5: F.dropout3d}[len(shape)]

    def go(mesh: Any) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        x = torch.randn(shape)
        x = x if mesh is None else mw.shard_tensor(x, mesh, [mw.Shard(0), mw.Shard(1)])
        x = x.requires_grad_()
        torch.manual_seed(1)
        if mesh is None:
            return drop(x * 2, 0.3, True, inplace), 0
        with mw.trace_comm() as trace:
            out = drop(x * 2, 0.3, True, inplace)
        return mw.unshard_dtensor(out), len(trace.calls)

    wanted, _ = go(None)
    assert mw.simulate(lambda: [torch.equal(found, wanted) for found, _ in [go(MESH)]], 4) == [[True]] * 4
    assert [calls for _, calls in mw.simulate(go, 4, MESH)] == [0] * 4


@pytest.mark.parametrize(
    ("drop", "shape"), [(F.dropout1d, (6, 5)), (F.dropout2d, (6, 5, 3)), (F.dropout3d, (6, 2, 2, 3))]
)
def test_channels_of_one_sample(drop: Any, shape: tuple[int, ...]) -> None:
    def go() -> Tensor:
        x = mw.shard_tensor(torch.ones(shape), MESH, [mw.Shard(0)])
        torch.manual_seed(1)
        return mw.unshard_dtensor(drop(x, 0.3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        wanted = drop(torch.ones(shape), 0.3)
        assert all(torch.equal(found, wanted) for found in mw.simulate(go, 4))
