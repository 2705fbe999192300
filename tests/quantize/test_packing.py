"""Packed codes: the inverse, and the words that compressed-tensors reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.quantize._packing import pack, packed_length, unpack


@given(st.integers(2, 8), st.integers(1, 70), st.integers(0, 2**31))
def test_unpacking_is_the_inverse(bits: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (2, length), dtype=torch.int8, generator=generator)
    words = pack(codes, bits)
    assert words.shape == (2, packed_length(length, bits))
    assert torch.equal(unpack(words, bits, length), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_code_begins_at_its_bit(bits: int) -> None:
    """The bits of a row are one large number, whose digits are the codes without a sign."""
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (1, 37), dtype=torch.int8, generator=torch.Generator().manual_seed(bits))
    number = sum((int(code) + half) << (i * bits) for i, code in enumerate(codes[0]))
    words = [int(word) & 0xFFFFFFFF for word in pack(codes, bits)[0]]
    assert sum(word << (32 * i) for i, word in enumerate(words)) == number
