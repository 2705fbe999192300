"""torch's selective checkpoints compare the calls of a forward pass with those of its repetition, by dispatch modes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import meshwright as mw

PLACEMENTS = [mw.Replicate(), mw.Shard(0), mw.Shard(1)]
KEPT = {
    "products": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    "everything but products": [torch.ops.aten.gelu.default, torch.ops.aten.tanh.default],
    "nothing": [],
}


def _policy(kept: list[Any], ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _body(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.layer_norm(F.linear(F.gelu(F.linear(x, w)), v), (8,)).tanh()


def _gradients(tensors: Sequence[Tensor], kept: list[Any]) -> list[Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    leaves = [x.requires_grad_() for x in tensors]
    checkpoint(_body, *leaves, use_reentrant=False, context_fn=contexts).square().sum().backward()
    return [mw.unshard_dtensor(x.grad) if isinstance(x.grad, mw.DistTensor) else x.grad for x in leaves]  # pyright: ignore


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, 8), torch.randn(12, 8), torch.randn(8, 12)]


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_one_device_on_every_layout(ranks: int, kept: str) -> None:
    right = _gradients(_inputs(), KEPT[kept])

    def run() -> None:
        mesh = mw.init_mesh(tp=ranks)
        for layout in itertools.product(PLACEMENTS, repeat=3):
            laid = [mw.shard_tensor(x, mesh, [how]) for x, how in zip(_inputs(), layout, strict=True)]
            found = _gradients(laid, KEPT[kept])
            torch.testing.assert_close(found, right, msg=lambda text, layout=layout: f"{layout}: {text}")

    mw.simulate(run, ranks)


def test_a_mode_gets_the_same_calls_on_each_rank() -> None:
    def run() -> int:
        mesh = mw.init_mesh(tp=3)
        x = mw.shard_tensor(torch.ones(6, 6), mesh, [mw.Shard(1)])
        with FlopCounterMode(display=False) as counter:
            (x @ x).sum().item()
        return counter.get_total_flops()

    flops = mw.simulate(run, 3)
    assert flops == [2 * 6 * 6 * 2] * 3
