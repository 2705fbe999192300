"""Tiles of attention: fused kernels give the values and gradients of plain operators, and merged tiles those of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.graph.torch_hooks import FakeMode
from meshwright.spmd.forms import attention_tiles
from meshwright.spmd.forms.attention_tiles import Merged, Rows, Tile
from meshwright.spmd.torch_hooks import AttentionKernel, attention_kernel

HEADS = {"none": ((), ()), "some": ((3,), (3,)), "batch": ((2, 3), (2, 3)), "shared": ((2, 2, 3), (2, 2, 1))}
MASKS: dict[str, Callable[[int, int], Tensor | None]] = {
    "none": lambda s, t: None,
    "bool": lambda s, t: (torch.arange(s)[:, None] * 3 + torch.arange(t)) % 4 > s // 3,
    "no key": lambda s, t: (torch.arange(s)[:, None] != 2).expand(s, t),
    "terms": lambda s, t: torch.arange(s * t).view(s, t) % 5 - 2.0,
    "one row": lambda s, t: torch.arange(t)[None] % 3 > 0,
}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def tiles(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tile]]:
    """Yield queries and tiles: heads, even and odd sizes, masks, causality."""
    for (heads, shared), (s, t, d, e), mask in itertools.product(
        HEADS.values(), ((6, 6, 4, 5), (7, 12, 16, 8), (5, 5, 8, 8)), MASKS
    ):
        given = MASKS[mask](s, t)
        given = given.to(dtype) if given is not None and given.dtype != torch.bool else given
        query = random_tensor(*heads, s, d, dtype=dtype)
        key, value = random_tensor(*shared, t, d, dtype=dtype), random_tensor(*shared, t, e, dtype=dtype)
        yield query, Tile(key, value, given, mask == "none" and s == t, 0.4)


def everything(query: Tensor, tile: Tile, device: str = "cpu") -> list[Tensor]:
    """Return the result, the log-sums, and the gradients of queries, keys and values."""
    key, value, mask = tile.key.to(device), tile.value.to(device), None if tile.mask is None else tile.mask.to(device)
    there = Tile(key, value, mask, tile.is_causal, tile.scale)
    with torch.no_grad():
        out, total = there.attend(query.to(device))
        grad = random_tensor(*out.shape, dtype=query.dtype).to(device)
        found = there.gradients(Rows(query.to(device), grad, out.to(query.dtype), total))
        return [x.cpu() for x in (out, total, *found)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_kernels_give_the_numbers_of_plain_operators(dtype: torch.dtype, device: str) -> None:
    for query, tile in tiles(dtype):
        mask = None if tile.mask is None else tile.mask.to(device)
        assert (attention_kernel(query.to(device), mask) is None) == (device == "cuda" and dtype == torch.float64)
        found = everything(query, tile, device)
        with sdpa_kernel(SDPBackend.MATH):
            assert attention_kernel(query, tile.mask) is None
            mask = tile.mask.double() if tile.mask is not None and tile.mask.is_floating_point() else tile.mask
            exact = Tile(tile.key.double(), tile.value.double(), mask, tile.is_causal, tile.scale)
            goal = everything(query.double(), exact)
        for x, wanted in zip(found, goal, strict=True):
            torch.testing.assert_close(x.double(), wanted, rtol=LIMITS[dtype], atol=10 * LIMITS[dtype])


@pytest.mark.parametrize("mask", MASKS)
def test_merged_tiles_are_attention_to_all_keys(mask: str) -> None:
    """In any order, with gradients from the merged result."""
    query, key, value = random_tensor(2, 3, 6, 8), random_tensor(2, 3, 9, 8), random_tensor(2, 3, 9, 4)
    seen = MASKS[mask](6, 9)
    with torch.no_grad():
        out, total = Tile(key, value, seen, False, 0.3).attend(query)
        grad = random_tensor(*out.shape)
        goal = Tile(key, value, seen, False, 0.3).gradients(Rows(query, grad, out, total))
        for bounds in itertools.permutations(((0, 4), (4, 5), (5, 9))):
            merged, grad_query = Merged.empty(query, 4), torch.zeros_like(query)
            for part in (_part(key, value, seen, *at) for at in bounds):
                merged.merge(*part.attend(query))
            torch.testing.assert_close((merged.out, merged.total), (out, total))
            for start, stop in bounds:
                part = _part(key, value, seen, start, stop).gradients(Rows(query, grad, merged.out, merged.total))
                grad_query = grad_query + part[0]
                torch.testing.assert_close(part[1:], tuple(g[..., start:stop, :] for g in goal[1:]))
            torch.testing.assert_close(grad_query, goal[0])


def _part(key: Tensor, value: Tensor, mask: Tensor | None, start: int, stop: int) -> Tile:
    columns = None if mask is None else mask[:, start:stop]
    return Tile(key[..., start:stop, :], value[..., start:stop, :], columns, False, 0.3)


class Largest(TorchDispatchMode):
    """Mode that finds the size of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = (x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor))
        self.elements = max(self.elements, *(x.numel() for x in found), 0)
        return out


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_a_ring_never_holds_scores(causal: bool) -> None:
    """The largest tensor has as many elements as keys and values of a part, whatever the length is."""
    line = mw.ProcessMesh([0, 1], ["cp"])

    def go() -> int:
        q, k, v = (mw.shard_tensor(random_tensor(1, 2, 512, 8), line, [mw.Shard(2)]).requires_grad_() for _ in range(3))
        with mw.context_parallel("ring"), Largest() as largest:
            F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        return largest.elements

    assert mw.simulate(go, 2) == [2 * 256 * 2 * 8] * 2


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_cuda_accept_the_arguments(dtype: torch.dtype, mask: torch.dtype | None) -> None:
    """Operators on fake tensors check shapes and arguments as the device does, and no machine needs the device."""
    with FakeMode(), torch.device("cuda"), torch.no_grad():
        seen = None if mask is None else torch.ones(7, 12, dtype=mask)
        query, key, value, grad = (torch.ones(2, 3, *n, dtype=dtype) for n in ((7, 4), (12, 4), (12, 5), (7, 5)))
        assert (attention_kernel(query, seen) is not None) == (mask in (None, torch.bool, dtype))
        tile = Tile(key, value, seen, False, 0.4)
        out, total = tile.attend(query)
        assert out.dtype == total.dtype == torch.float32
        assert (out.shape, total.shape) == (grad.shape, (2, 3, 7, 1))
        found = tile.gradients(Rows(query, grad, out.to(dtype), total))
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, dtype) for x in (query, key, value)]


def test_flash_attention_of_cuda_has_at_most_256_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries and of values, since kernels get as many channels of both."""
    chosen: list[AttentionKernel | None] = []

    def noting(*args: Any) -> AttentionKernel | None:
        chosen.append(attention_kernel(*args))
        return chosen[-1]

    monkeypatch.setattr(attention_tiles, "attention_kernel", noting)
    with FakeMode(), torch.device("cuda"), torch.no_grad():
        for size in (250, 264):
            query, value = (
                torch.ones(1, 1, 8, 64, dtype=torch.bfloat16),
                torch.ones(1, 1, 8, size, dtype=torch.bfloat16),
            )
            Tile(query, value, None, False, 1.0).attend(query)
        efficient = attention_kernel(query.float(), None)
    assert chosen[0] is not efficient
    assert chosen[1] is efficient
