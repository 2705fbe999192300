"""Autocast in an eager pipeline: ranks outside a stage know the dtypes inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import Llama, LlamaConfig, mark

SMALL = LlamaConfig(vocab=32, hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=48)

TOKENS = torch.randint(0, SMALL.vocab, (8, 9), generator=torch.Generator().manual_seed(1))
BATCH = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
HALVES = (torch.bfloat16, torch.float16)


def llama(shape: tuple[int, ...] | None) -> nn.Module:
    model = Llama(SMALL, 0)
    if shape is not None:
        mark(model, mw.ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape), ["pp", "dp", "tp"]))
    return model


def stepped(model: nn.Module, dtype: torch.dtype, scaled: bool = False) -> tuple[list[float], list[Tensor]]:
    """Return the losses of three steps, the second without autocast, and the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    losses = list[float]()
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=step != 1):
            loss = model(*BATCH)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [mw.unshard_dtensor(p.grad).clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
def test_numbers_are_those_of_one_device(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scaled = dtype == torch.float16
    losses, grads = stepped(llama(None), dtype, scaled)
    for found, others in mw.simulate(lambda: stepped(llama(shape), dtype, scaled), int(np.prod(shape))):
        assert found == pytest.approx(losses, rel=2e-2)
        for mine, one in zip(others, grads, strict=True):
            assert (mine - one).norm() <= 0.1 * one.norm() + 1e-3


X, W = torch.ones(4, 6), torch.ones(6, 6)
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": F.linear,
    "mm": torch.mm,
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "norm": lambda x, w: F.layer_norm(F.linear(x, w), (6,)),
    "rms": lambda x, w: F.rms_norm(F.linear(x, w), (6,)),
    "softmax": lambda x, w: F.linear(x, w).softmax(-1),
    "activation": lambda x, w: F.silu(F.linear(x, w)),
    "sum": lambda x, w: F.linear(x, w).sum(),
    "mean": lambda x, w: F.linear(x, w).mean(0),
    "pair": lambda x, w: F.linear(x, w).max(dim=1),
    "chunks": lambda x, w: F.linear(x, w).chunk(2, -1),
    "entropy": lambda x, w: F.cross_entropy(F.linear(x, w), torch.zeros(4, dtype=torch.long)),
    "square": lambda x, w: F.mse_loss(F.linear(x, w), x),
    "attention": lambda x, w: F.scaled_dot_product_attention(F.linear(x, w)[None], x[None], x[None]),
    "written": lambda x, w: x.clone().add_(F.linear(x, w)),
    "double": lambda x, w: F.linear(x.double(), w.double()),
    "cat": lambda x, w: torch.cat([x, F.linear(x, w)]),
    "pow": lambda x, w: F.linear(x, w).pow(2),
    "like": lambda x, w: torch.zeros_like(F.linear(x, w)),
    "compared": lambda x, w: F.linear(x, w) > 0,
    "dropped": lambda x, w: F.dropout(F.linear(x, w), 0.5),
    "sized": lambda x, w: F.linear(x, w).view(2, -1).sum(0) / x.size(0),
}


@pytest.mark.parametrize("cut", [mw.Shard(0), mw.Shard(1), mw.Replicate()], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_outside_knows_dtypes_and_layouts(name: str, dtype: torch.dtype, cut: mw.Placement) -> None:
    """Calls in float32, under autocast, and again in float32: their plans are known by then."""

    def go() -> list[str]:
        torch.manual_seed(0)
        mesh = mw.ProcessMesh([1, 2], ["tp"])
        x, w = mw.shard_tensor(X, mesh, [cut]), mw.shard_tensor(W, mesh, [mw.Replicate()])
        found = list[str]()
        for on in (False, True, False, True):
            with torch.autocast("cpu", dtype, enabled=on):
                out = CALLS[name](x, w)
            found += [repr(t.spec) for t in (out if isinstance(out, (tuple, list)) else (out,))]
        return found

    here, one, other = mw.simulate(go, 3)
    assert one == other
    assert here == one


Trained = tuple[list[float], list[Tensor], float]
"""Losses, parameters, and the scale after the last step."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def rows(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return x * (1e6 if step == 2 and dtype == torch.float16 else 1), torch.zeros(8, 8)


def scaler_for(dtype: torch.dtype) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)


def train_on_one_device(dtype: torch.dtype) -> Trained:
    net, scale = layers(), scaler_for(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = list[float]()
    for step in range(4):
        total = 0.0
        for x, y in zip(*(t.chunk(2) for t in rows(step, dtype)), strict=True):
            with torch.autocast("cpu", dtype):
                loss = F.mse_loss(net(x), y) / 2
            scale.scale(loss).backward()
            total += loss.item()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        losses.append(total)
    return losses, [p.detach() for p in net.parameters()], scale.get_scale()


def scheduled(dtype: torch.dtype, loop: bool) -> Trained:
    mesh, scale = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"]), scaler_for(dtype)
    net = mw.split_pipeline(layers(), mesh, ["2"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = list[float]()
    if loop:
        data = [rows(step, dtype) for step in range(4)]
        how = mw.Training(4, autocast=dtype, show=False)
        losses += mw.train(mw.microbatched(net, F.mse_loss, mesh, 2), optimizer, data, how, scaler=scale).losses
    else:
        run = mw.microbatched(net, F.mse_loss, mesh, 2, autocast=dtype, scaler=scale)
        for step in range(4):
            losses.append(mw.unshard_dtensor(run(*rows(step, dtype))).item())
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    return losses, [mw.unshard_dtensor(p.detach()) for p in net.parameters()], scale.get_scale()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("loop", [False, True])
def test_microbatches_by_a_schedule(dtype: torch.dtype, loop: bool) -> None:
    """The third batch overflows float16: no rank makes its update, and the scale is halved."""
    wanted = train_on_one_device(dtype)
    for losses, parameters, scale in mw.simulate(lambda: scheduled(dtype, loop), 4):
        assert losses == pytest.approx(wanted[0], rel=2e-2, nan_ok=True)
        assert scale == wanted[2]
        for mine, theirs in zip(parameters, wanted[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)
