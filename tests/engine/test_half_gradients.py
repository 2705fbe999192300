"""Gradients in half precision, clipped and accumulated under every stage of ZeRO: as near to float64 as one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import meshwright as mw

HALVES = (torch.bfloat16, torch.float16)
NORMS = (1.0, 2.0, 3.0, float("inf"))


def stage(number: int, axis: str, model: nn.Module) -> Any:
    kinds: list[Any] = [None, mw.ShardingStage1, mw.ShardingStage2, mw.ShardingStage3]
    return None if not number else kinds[number](axis, least=1, **({"model": model} if number > 1 else {}))


class Weights(nn.Module):
    """Parameters of these shapes."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for at, shape in enumerate(shapes):
            self.register_parameter(f"w{at}", nn.Parameter(torch.zeros(shape, dtype=dtype)))


def numbers(shapes: list[tuple[int, ...]], scale: float, dtype: torch.dtype, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=g) * scale).to(dtype) for shape in shapes]


SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.integers(1, 40))), min_size=1, max_size=4
)


@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES,
    dtype=st.sampled_from(HALVES),
    number=st.sampled_from([0, 1, 2, 3]),
    kind=st.sampled_from(NORMS),
    scale=st.sampled_from([1e-3, 1.0, 60.0]),
    most=st.sampled_from([0.5, 1e6]),
    seed=st.integers(0, 99),
    ranks=st.sampled_from([2, 3]),
    ours=st.booleans(),
)
def test_clipping(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    number: int,
    kind: float,
    scale: float,
    most: float,
    seed: int,
    ranks: int,
    ours: bool,
) -> None:
    """The norm and the clipped gradients, compared with float64.

    A norm that float16 cannot hold is infinite on one device, too.
    """
    exact = [g.double() for g in numbers(shapes, scale, dtype, seed)]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, kind) for g in exact]), kind)
    eps = torch.finfo(dtype).eps
    clip = mw.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_

    def go() -> tuple[Tensor, list[Tensor]]:
        mesh = mw.ProcessMesh(range(ranks), ["dp"])
        net = mw.shard_layer(Weights(shapes, dtype), mesh)
        mw.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), stage(number, "dp", net))
        for p, g in zip(net.parameters(), numbers(shapes, scale, dtype, seed), strict=True):
            p.grad = mw.shard_tensor(g, mesh, p.placements)
        found = clip(net.parameters(), most, kind)
        return mw.unshard_dtensor(found).double(), [mw.unshard_dtensor(p.grad).double() for p in net.parameters()]

    factor = min(1.0, most / (float(norm) + 1e-6))
    for found, grads in mw.simulate(go, ranks):
        if dtype == torch.float16 and norm > 65000:
            continue
        torch.testing.assert_close(found, norm, rtol=8 * eps, atol=0.0)
        for mine, g in zip(grads, exact, strict=True):
            torch.testing.assert_close(mine, g * factor, rtol=16 * eps, atol=1e-7)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [8, 7])
def test_accumulation(number: int, dtype: torch.dtype, rows: int) -> None:
    """Gradients of four backward passes are accumulated: their error is that of a few roundings of the sum's terms."""

    def made(dtype: torch.dtype) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 35), nn.Tanh(), nn.Linear(35, 3)).to(dtype)

    def passes(net: nn.Module, lay: Any, dtype: torch.dtype) -> list[Tensor]:
        for step in range(4):
            x = torch.randn(rows, 9, generator=torch.Generator().manual_seed(step))
            (net(lay(x.to(dtype))).float().square().mean() / 4).backward()
        mw.clip_grad_norm_(net.parameters(), 1e6)
        return [mw.unshard_dtensor(p.grad).double() for p in net.parameters()]

    low = made(dtype)
    exact = made(torch.float64)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), low.parameters(), strict=True):
            p.copy_(q)
    wanted = passes(exact, lambda x: x.to(dtype).double(), torch.float64)
    one = passes(low, lambda x: x, dtype)

    def go() -> list[Tensor]:
        mesh = mw.ProcessMesh([0, 1, 2], ["dp"])
        net = mw.shard_layer(made(dtype), mesh)
        mw.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), stage(number, "dp", net))
        return passes(net, lambda x: mw.shard_tensor(x, mesh, [mw.Shard(0)]), dtype)

    for found in mw.simulate(go, 3):
        for mine, theirs, g in zip(found, one, wanted, strict=True):
            far, one_far = (mine - g).norm(), (theirs - g).norm()
            assert far <= 2 * one_far + 4 * torch.finfo(dtype).eps * g.norm()
