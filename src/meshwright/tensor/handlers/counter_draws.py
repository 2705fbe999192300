"""Counter-based random numbers: each element is a function of a key and of its position.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter of 128
bits and a key of 64 bits into four words of 32 random bits. An element needs 1, 2 or 4 words, so 4, 2 or 1 neighbours
along the last dim share a counter. With n elements per counter, the element at (i, …, j, k) has the counter

    the linear index of (i, …, j, k // n) in a tensor whose last dim has ceil(size / n) elements

and the words from (k % n) * (4 / n) on. This holds for any part of the tensor, so each rank computes its own part
alone. Uniforms and the values derived from them are float64 until the end. Vector lanes differ in the last bits only,
and these are rounded away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Product, Spec, TorchValue

from ..autograd.intercepted_call import named_arguments
from ..torch_hooks import FakeTensor

Key = tuple[int, int]
"""A key of two 32-bit words."""
Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""32-bit words in int64 tensors of one shape."""

MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

AT_ONCE = {"cpu": 1 << 14}
"""Number of counters processed at a time; on a CPU, as many as fit into its cache."""
AT_ONCE_ELSEWHERE = 1 << 24


def philox(counter: Words, key: Key) -> Words:
    """Return four random words per counter (Philox 4x32-10).

    >>> [f"{word.item():08x}" for word in philox((torch.tensor([0]),) * 4, (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    k, m = key
    for _ in range(_ROUNDS):
        # int64 products wrap like unsigned ones; bits above 32 are masked later
        p, q = a * _FACTORS[0], c * _FACTORS[1]
        a = (q >> 32).bitwise_xor_(b).bitwise_xor_(k).bitwise_and_(MASK)
        c = (p >> 32).bitwise_xor_(d).bitwise_xor_(m).bitwise_and_(MASK)
        b, d = q, p
        k, m = (k + _STEPS[0]) & MASK, (m + _STEPS[1]) & MASK
    return a, b.bitwise_and_(MASK), c, d.bitwise_and_(MASK)


def draw_bits(generator: torch.Generator | None = None) -> Tensor:
    """Return 64 bits from torch's default CPU generator, or from the given generator, in an int64 tensor."""
    device = generator.device if generator is not None else "cpu"
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=device, generator=generator)


def key_of(bits: Tensor) -> Key:
    number = int(bits)
    return number & MASK, (number >> 32) & MASK


# --- distributions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distribution:
    """Transform of uniforms in [0, 1) to a distribution: `transform(*uniforms, *parameters)`.

    `parameters` are torch's names and defaults. `counts` is True if the numbers are integers, so that integer tensors
    accept them. `below` is True if the result must not be 1: the uniforms then have no more digits than the dtype.
    """

    transform: Callable[..., Tensor]
    parameters: Mapping[str, float]
    uniforms: int = 1
    counts: bool = False
    below: bool = False

    def values(self, args: Sequence[float], kwargs: Mapping[str, TorchValue]) -> list[float]:
        """Return the values of the parameters in a call; other entries of `kwargs` are ignored."""
        given = named_arguments(self.parameters, args, kwargs)
        return [given.get(name, default) for name, default in self.parameters.items()]


def _normal(u: Tensor, v: Tensor, mean: float, std: float) -> Tensor:
    """Return normal numbers by the Box-Muller transform; 1 - u is not 0."""
    return torch.cos(v * (2 * math.pi)) * torch.sqrt(-2 * torch.log1p(-u)) * std + mean


def _exponential(u: Tensor, rate: float) -> Tensor:
    """Return exponential numbers above 0, as torch does."""
    return -torch.log1p(-u).clamp_max(-(2.0**-54)) / rate


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform_": Distribution(lambda u, low, high: u * (high - low) + low, {"from": 0.0, "to": 1.0}, below=True),
    "normal_": Distribution(_normal, {"mean": 0.0, "std": 1.0}, uniforms=2),
    "log_normal_": Distribution(lambda *a: _normal(*a).exp(), {"mean": 1.0, "std": 2.0}, uniforms=2),
    "exponential_": Distribution(_exponential, {"lambd": 1.0}),
    "cauchy_": Distribution(lambda u, m, s: torch.tan((u - 0.5) * math.pi) * s + m, {"median": 0.0, "sigma": 1.0}),
    "geometric_": Distribution(
        lambda u, p: (torch.log1p(-u) / (math.log1p(-p) if p < 1 else -math.inf)).ceil().clamp_min(1),
        {"p": 0.5},
        counts=True,
    ),
    "bernoulli_": Distribution(lambda u, p: u < p, {"p": 0.5}, counts=True),
    "dropout": Distribution(lambda u, p: (u >= p).double().div_(1 - p), {"p": 0.5}),
}
"""Distributions that counters can draw: a tensor's method, or "dropout" for the mask that dropout multiplies by."""

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def is_counted(name: str, dtype: torch.dtype) -> bool:
    """True if counters can draw this distribution in this dtype."""
    if name not in DISTRIBUTIONS:
        return False
    return dtype in _DIGITS or (DISTRIBUTIONS[name].counts and not (dtype.is_floating_point or dtype.is_complex))


# --- the numbers of a part ---------------------------------------------------------------------------------------


def counted(name: str, values: Sequence[float], key: Key, spec: Spec, rank: int, device: torch.device) -> Tensor:
    """Return the part of `rank` under `spec` of a tensor drawn from a distribution.

    Pending terms of `spec` are ignored.
    """
    shape = spec.local_shape(rank)
    if not math.prod(shape):
        return torch.empty(shape, dtype=spec.dtype, device=device)
    places = _indices(spec, rank)
    return counted_at(name, values, key, spec.shape, places, spec.dtype, device).reshape(shape)


def counted_at(
    name: str,
    values: Sequence[float],
    key: Key,
    whole: Sequence[int],
    places: Sequence[Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the elements of a tensor of shape `whole` drawn from a distribution, with these indices in each dim.

    Indices of the last dim are in ascending order. The result is flat.
    """
    if not all(x.numel() for x in places):
        return torch.empty(0, dtype=dtype, device=device)
    kind = DISTRIBUTIONS[name]
    per = 4 // (kind.uniforms * (2 if dtype is torch.float64 else 1))
    last = whole[-1] if whole else 1
    *dims, columns = places or [torch.zeros(1, dtype=torch.int64, device="cpu")]
    rows = _linear_indices([(n, at.to(device)) for n, at in zip(whole, dims, strict=False)], device)
    blocks, within = torch.unique(columns // per, return_inverse=True)
    counters = _linear_indices([(1, rows), (-(-last // per), blocks.to(device))], device)
    out = torch.empty(counters.numel() * per, dtype=dtype, device=device)
    step = AT_ONCE.get(device.type, AT_ONCE_ELSEWHERE)
    for start, part in zip(range(0, out.numel(), step * per), counters.split(step), strict=True):
        numbers = kind.transform(*_uniforms(part, key, kind, dtype), *values)
        out[start : start + part.numel() * per] = numbers.flatten()
    return _columns_at(out.view(rows.numel(), -1), within * per + columns % per).flatten()


def _dropout_factors(
    bits: Tensor,
    batch: Tensor,
    heads: Tensor,
    rows: Tensor,
    keys: Tensor,
    shape: list[int],
    p: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the factors by which dropout multiplies the weights of attention at these places."""
    places = batch, heads, rows, keys
    found = counted_at("dropout", (p,), key_of(bits), shape, places, dtype, rows.device)
    return found.reshape([x.numel() for x in places])


_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.impl("dropout_factors", _dropout_factors, "CompositeExplicitAutograd")


@dataclass(frozen=True, slots=True)
class Counted:
    """An operator from the 64 bits of the key to the caller's part of a drawn tensor."""

    name: str
    values: tuple[float, ...]
    spec: Spec
    device: torch.device

    def __call__(self, bits: Tensor) -> Tensor:
        if isinstance(bits, FakeTensor) or bits.is_meta:
            return self.empty()
        return counted(self.name, self.values, key_of(bits), self.spec, current_communicator().rank, self.device)

    def empty(self) -> Tensor:
        """Return an uninitialized tensor like the result."""
        return torch.empty(
            self.spec.local_shape(current_communicator().rank), dtype=self.spec.dtype, device=self.device
        )

    def __repr__(self) -> str:
        return f"{self.name} of {self.spec!r} from counters"


def _indices(spec: Spec, rank: int) -> list[Tensor]:
    """Return for each dim the global indices that `rank` holds, in ascending order."""
    ranges = iter(spec.local_ranges(rank))
    found: list[Tensor] = []
    for n, dim in zip(spec.shape, spec.layout.dims, strict=True):
        sizes = [size for size, _ in dim.factors] if isinstance(dim, Product) else [n]
        starts = [next(ranges) for _ in sizes]
        held = [
            (size, torch.arange(at, at + many, device="cpu")) for size, (at, many) in zip(sizes, starts, strict=True)
        ]
        found.append(_linear_indices(held, torch.device("cpu")))
    return found


def _linear_indices(dims: Sequence[tuple[int, Tensor]], device: torch.device) -> Tensor:
    """Return the row-major linear indices of all elements with the given indices.

    `dims` has (size, indices) per dim.
    """
    out = torch.zeros(1, dtype=torch.int64, device=device)
    for size, at in dims:
        out = (out.unsqueeze(1) * size + at).flatten()
    return out


def _uniforms(counters: Tensor, key: Key, kind: Distribution, dtype: torch.dtype) -> list[Tensor]:
    """Return the distribution's uniforms, each with a row per counter and a column per element of the counter."""
    zero = torch.zeros_like(counters)
    words = torch.stack(philox((counters & MASK, counters >> 32, zero, zero), key), 1)
    if dtype is torch.float64:
        u = (words[:, 0::2] >> 5).double().mul_(2.0**26).add_(words[:, 1::2] >> 6).mul_(2.0**-53)
    elif kind.below:
        u = (words >> (32 - _DIGITS[dtype])).double().mul_(2.0 ** -_DIGITS[dtype])
    else:
        u = words.double().mul_(2.0**-32)
    return [u[:, at :: kind.uniforms] for at in range(kind.uniforms)]


def _columns_at(x: Tensor, at: Tensor) -> Tensor:
    """Return the columns `at` of `x`, in ascending order."""
    first, many = int(at[0]), at.numel()
    if int(at[-1]) - first + 1 == many:
        return x.narrow(1, first, many)
    return x.index_select(1, at.to(x.device))
