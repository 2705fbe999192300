"""`shared_memory` finds the same overlaps as a comparison of the bytes of all elements."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from meshwright.tensor import shared_memory
from meshwright.tensor.views import memory_overlap


def _views(seed: int) -> list[Tensor]:
    """Return random views of a few buffers."""
    draw, flats = random.Random(seed), [torch.zeros(48), torch.zeros(24, dtype=torch.float64), torch.zeros(20).half()]
    found: list[Tensor] = []
    for _ in range(draw.randint(2, 6)):
        x = draw.choice(flats)
        start = draw.randrange(len(x))
        sizes = [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]
        steps = [draw.randint(0, 6) for _ in sizes]
        if start + sum((n - 1) * s for n, s in zip(sizes, steps, strict=True)) < len(x):
            found.append(x.as_strided(sizes, steps, start))
    return [*found, flats[0].view(torch.int16)[seed % 90 :][:3]]


def _bytes(x: Tensor) -> set[int]:
    places = torch.arange(10**4).as_strided(x.shape, x.stride(), 0) * x.element_size() + x.data_ptr()
    return {int(p) + n for p in places.reshape(-1) for n in range(x.element_size())}


def _is_same(a: Tensor, b: Tensor) -> bool:
    steps = [[(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] for x in (a, b)]
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype and steps[0] == steps[1]


def test_shared_elements_are_found() -> None:
    for seed in range(300):
        tensors, count = _views(seed), 1 + seed % 4
        groups, pairs = shared_memory(tensors, count)
        held = [_bytes(x) for x in tensors]
        same = {frozenset(j for j, y in enumerate(tensors) if _is_same(x, y)) for x in tensors}
        assert {frozenset(g) for g in groups} == {g for g in same if len(g) > 1 and min(g) < count}
        assert all(held[a] & held[b] and not _is_same(tensors[a], tensors[b]) for a, b in pairs)
        firsts = [min(g) for g in same]
        overlap = any(a < b and a < count and held[a] & held[b] for a in firsts for b in firsts)
        assert bool(pairs) == overlap, seed


def test_parts_of_a_flat_buffer_do_not_overlap() -> None:
    flat = torch.zeros(64, 8)
    pieces = [*flat[:32].split(4, 1), *flat[32:].unbind(), torch.zeros(0), flat[:0], torch.zeros(3, device="meta")]
    assert shared_memory(pieces, len(pieces)) == ([], [])


def test_very_large_ranges_count_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(64, 8)
    pieces = [flat[:, :4], flat[:, 4:], flat[:, 2:3]]
    assert shared_memory(pieces[:2], 2) == ([], [])
    monkeypatch.setattr(memory_overlap, "MOST_UNITS", 8)
    assert shared_memory(pieces[:2], 2) == ([], [(0, 1)])
    assert shared_memory(pieces, 1) == ([], [(0, 1)])
