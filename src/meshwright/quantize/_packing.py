"""Codes of few bits, packed into int32 without gaps along a row, as compressed-tensors stores them.

Code i of a row begins at bit i * bits of the row. The lowest bits of a word come first. Codes are stored without a
sign: 0 is the smallest. Two floats of 4 bits share a byte, the first one in its lower bits. Plain torch, so that packed
tensors are sharded between words.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.tensor import DistTensor

WORD = 32
"""Bits of an int32."""
BYTE = 8


def packed_length(count: int, bits: int) -> int:
    """Return the number of int32 that hold a row of codes.

    >>> packed_length(64, 3)
    6
    """
    return -(-count * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return the int32 words of int8 codes [..., k].

    >>> pack(torch.tensor([[-8, -7, 0, 7]], dtype=torch.int8), 4).tolist()
    [[63504]]
    """
    run = _run(bits)
    length = codes.shape[-1]
    plain = codes.to(torch.int32) + (1 << (bits - 1))
    if length % run:
        plain = F.pad(plain, (0, run - length % run))
    plain = plain.unflatten(-1, (plain.shape[-1] // run, run))
    words = _words(plain, bits).flatten(-2)
    wanted = packed_length(length, bits)
    return words if words.shape[-1] == wanted else words[..., :wanted].contiguous()


def _run(bits: int) -> int:
    """Return the length of the shortest run of codes that fills whole words, if a code never crosses words, else 32."""
    return WORD // bits if WORD % bits == 0 else WORD


def _words(plain: Tensor, bits: int) -> Tensor:
    """Return the words of runs of unsigned codes: [..., run] -> [..., run * bits / 32]."""
    run = plain.shape[-1]
    if run * bits == WORD:
        return (plain << _shifts(bits, plain.device)).sum(-1, dtype=torch.int32).unsqueeze(-1)
    starts = torch.arange(0, WORD * bits, bits, dtype=torch.int32, device=plain.device)
    word, shift = starts // WORD, starts % WORD
    target = torch.arange(bits, dtype=torch.int32, device=plain.device).unsqueeze(-1)
    codes = plain.unsqueeze(-2)
    low = torch.where(word == target, codes << shift, 0)
    crosses = (word + 1 == target) & (shift + bits > WORD)
    high = torch.where(crosses, codes >> (WORD - shift).clamp(max=WORD - 1), 0)
    return (low | high).sum(-1, dtype=torch.int32)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, WORD, bits, dtype=torch.int32, device=device)


def unpack(words: Tensor, bits: int, length: int) -> Tensor:
    """Return the int8 codes of a row of `length`: the inverse of `pack`.

    >>> unpack(torch.tensor([[63504]], dtype=torch.int32), 4, 4).tolist()
    [[-8, -7, 0, 7]]
    """
    mask = (1 << bits) - 1
    has_bytes = BYTE % bits == 0 and sys.byteorder == "little"
    if has_bytes and not isinstance(words, DistTensor):  # views with another item size have no rule
        codes = _of_bytes(words.contiguous().view(torch.uint8), bits, mask)
    elif WORD % bits == 0:
        plain = (words.unsqueeze(-1) >> _shifts(bits, words.device)) & mask
        codes = (plain.flatten(-2) - (1 << (bits - 1))).to(torch.int8)
    else:
        codes = (_crossing(words, bits, mask).flatten(-2) - (1 << (bits - 1))).to(torch.int8)
    return codes if codes.shape[-1] == length else codes[..., :length]


def _of_bytes(data: Tensor, bits: int, mask: int) -> Tensor:
    """Return the codes of bytes, each with one code or several: an eighth of the memory of their words."""
    if bits == BYTE:
        return (data ^ (1 << (BYTE - 1))).view(torch.int8)
    parts = torch.stack([(data >> shift) & mask for shift in range(0, BYTE, bits)], -1)
    return parts.flatten(-2).view(torch.int8) - (1 << (bits - 1))


def _crossing(words: Tensor, bits: int, mask: int) -> Tensor:
    """Return the unsigned codes of runs of 32, some of which cross two words."""
    if words.shape[-1] % bits:
        words = F.pad(words, (0, bits - words.shape[-1] % bits))
    runs = words.unflatten(-1, (words.shape[-1] // bits, bits))
    starts = torch.arange(0, WORD * bits, bits, device=words.device)
    word, shift = starts // WORD, (starts % WORD).to(torch.int32)
    left = WORD - shift
    low = (runs[..., word] >> shift) & ((1 << left.clamp(max=bits)) - 1)
    high = runs[..., (word + 1).clamp(max=bits - 1)] << left.clamp(max=WORD - 1)
    return torch.where(left < bits, low | (high & mask), low)


def pack_float4(codes: Tensor) -> Tensor:
    """Return the bytes of float4 codes -7 to 7 [..., k], k even: a magnitude has 3 bits, and its sign one.

    >>> pack_float4(torch.tensor([[1, -7]], dtype=torch.int8)).tolist()
    [[241]]
    """
    bits = codes.abs().to(torch.uint8) | torch.where(codes < 0, 8, 0).to(torch.uint8)
    pairs = bits.unflatten(-1, (bits.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_float4(words: Tensor) -> Tensor:
    """Return the int8 codes: the inverse of `pack_float4`.

    >>> unpack_float4(torch.tensor([[241]], dtype=torch.uint8)).tolist()
    [[1, -7]]
    """
    bits = torch.stack((words & 15, words >> 4), -1).flatten(-2)
    magnitude = (bits & 7).to(torch.int8)
    return torch.where(bits > 7, -magnitude, magnitude)
