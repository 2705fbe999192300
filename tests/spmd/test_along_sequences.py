"""Attention along a sharded sequence, by a ring and by heads, gives the values and gradients of one device.

The forms communicate in their backward pass too, so they run on simulated ranks. tests/engine/test_context.py tests
more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def qkv(heads: tuple[int, ...], shared: tuple[int, ...], length: int, out: int = 5) -> list[Tensor]:
    """Return queries, keys, values, and the factors of the result in the loss."""
    return [
        random_tensor(*heads, length, 4),
        random_tensor(*shared, length, 4),
        random_tensor(*shared, length, out),
        random_tensor(*heads, length, out),
    ]


def attended(given: list[Tensor], options: dict[str, Any], trains_mask: bool) -> list[Tensor]:
    """Return the result, and the gradients of queries, keys, values and a trained mask."""
    *leaves, weight = [x.detach().requires_grad_() for x in given]
    mask = options.get("attn_mask")
    if trains_mask and mask is not None:
        leaves.append(mask := mask.detach().requires_grad_())
    out = F.scaled_dot_product_attention(*leaves[:3], **{**options, "attn_mask": mask})
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def same(ranks: int, name: str, given: list[Tensor], trains_mask: bool = False, **options: Any) -> None:
    """Check that the named form runs, and that its numbers are those of one device."""
    goal = attended(given, options, trains_mask)
    mesh = mw.ProcessMesh(range(ranks), ["cp"])

    def work() -> list[Tensor]:
        laid = {k: mw.shard_tensor(v, mesh) if isinstance(v, Tensor) else v for k, v in options.items()}
        parts = [mw.shard_tensor(x, mesh, [mw.Shard(-2)]) for x in given]
        with mw.context_parallel(name):
            found = mw.explain(lambda: attended(parts, laid, trains_mask))
        assert [call.how for call in found.calls if "attention" in call.name] == [name]
        return [mw.unshard_dtensor(x) for x in found.result]

    for found in mw.simulate(work, ranks):
        for x, wanted in zip(found, goal, strict=True):
            assert x.dtype is wanted.dtype
            torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring(ranks: int, causal: bool) -> None:
    """The ring takes tensors with and without heads and batches, heads that share a key, and a scale."""
    n = 2 * ranks * (2 if causal else 1)
    same(ranks, "ring", qkv((2, 3), (2, 3), n), is_causal=causal)
    same(ranks, "ring", qkv((3,), (3,), n), is_causal=causal, scale=0.3)
    same(ranks, "ring", qkv((), (), n), is_causal=causal)
    same(ranks, "ring", qkv((1, 6), (1, 3), n), is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ring_of_uneven_parts(ranks: int, causal: bool) -> None:
    """Parts are padded; a rank may have no rows at all."""
    for n in (5, 7, 10):
        same(ranks, "ring", qkv((2, 4), (2, 2), n), is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_heads_in_the_place_of_the_sequence(ranks: int, causal: bool) -> None:
    same(ranks, "ulysses", qkv((2, 6), (2, 6), 7), is_causal=causal)
    same(ranks, "ulysses", qkv((12,), (6,), 8), is_causal=causal, scale=0.3, enable_gqa=True)


SEEN = torch.ones(6, 6, dtype=torch.bool).tril()
SEEN[3] = False  # a fully masked row
BIAS = random_tensor(6, 6).masked_fill(random_tensor(6, 6) > 0.8, float("-inf"))
MASKS = {
    "seen": SEEN, "bias": BIAS, "one for all heads": random_tensor(2, 1, 6, 6),
    "one for each head": random_tensor(2, 6, 6, 6), "one for all rows": random_tensor(2, 1, 1, 6),
}  # fmt: skip


@pytest.mark.parametrize("shared", [6, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, shared: int) -> None:
    for ranks in (2, 3):
        given = qkv((2, 6), (2, shared), 6)
        same(ranks, "ring", given, attn_mask=MASKS[mask], enable_gqa=shared < 6)
        if "each" not in mask and shared % ranks == 0:
            same(ranks, "ulysses", given, attn_mask=MASKS[mask], enable_gqa=shared < 6)


def test_a_mask_has_a_gradient() -> None:
    same(2, "ring", qkv((2, 4), (2, 4), 6), trains_mask=True, attn_mask=random_tensor(6, 6))
    same(2, "ring", qkv((2, 4), (2, 2), 6), trains_mask=True, attn_mask=random_tensor(2, 4, 6, 6), enable_gqa=True)


def test_half_precision_is_kept() -> None:
    given = [x.to(torch.bfloat16) for x in qkv((2, 4), (2, 4), 8)]
    mesh = mw.ProcessMesh(range(2), ["cp"])

    def work() -> list[Tensor]:
        with mw.context_parallel("ring"):
            found = attended([mw.shard_tensor(x, mesh, [mw.Shard(2)]) for x in given], {"is_causal": True}, False)
        return [mw.unshard_dtensor(x) for x in found]

    goal = attended([x.float() for x in given], {"is_causal": True}, False)
    for x, wanted in zip(mw.simulate(work, 2)[0], goal, strict=True):
        assert x.dtype is torch.bfloat16
        assert (x.float() - wanted).abs().max() <= 0.05 * wanted.abs().max()
