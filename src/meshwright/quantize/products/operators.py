"""Products with the codes of a stored weight as operators of torch: programs record them, and meshes shard them.

`packed_linear` has the numbers of the weight with its scales in float32. `integer_linear` is exact.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.layout import TorchValue
from meshwright.spmd import Rule, register_rule
from meshwright.tensor import products_are_fast

from .._packing import BYTE
from .._rounding import to_values
from .._scheme import FLOAT4_GROUPS, NumberFormat
from .._stored_weight import codes_of
from .kernels import form_of, integer_kernel, packed_kernel, run_integers, run_packed
from .most_rows import most_rows
from .torch_hooks import has_integer_instructions, product_of_integers

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, int bits, str kind) -> Tensor")
_LIBRARY.define("integer_linear(Tensor x, Tensor weight) -> Tensor")
_OPERATORS: TorchValue = torch.ops.meshwright
EXACT = 1024
"""Most products of two int8 codes whose sum is exact in float32."""


def packed_product(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, kind: str) -> Tensor:
    """Return x [..., k] times the transpose of a stored weight of n rows, without a gradient.

    `codes` are stored as `store` returns them. The scale is [n, g] or [1], and so is `zero`, the zero points.
    """
    return _OPERATORS.packed_linear(x, codes, scale, zero, bits, kind)


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product of int8 codes: [..., k] times the transpose of [n, k]."""
    return _OPERATORS.integer_linear(x, weight)


def _packed(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, kind: str) -> Tensor:
    kernel = packed_kernel() if products_are_fast() and x.is_cpu and x.numel() else None
    if kernel is None:
        groups = scale.shape[1] if scale.dim() == 2 else 1
        numbers = _numbers(bits, kind, x.shape[-1] // groups if groups > 1 else None)
        weight = to_values(codes_of(codes, bits, x.shape[-1]), scale, zero, numbers)
        return F.linear(x, weight.to(x.dtype))
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    zeros = None if zero is None else zero.float().contiguous()
    form = form_of(codes, bits, kind)
    found = run_packed(kernel, rows, codes.contiguous(), scale.float().contiguous(), zeros, form)
    return found.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


@lru_cache(maxsize=64)
def _numbers(bits: int, kind: Any, group_size: int | None) -> NumberFormat:
    """Return the format of the codes; without groups, a row has one scale, or all of them have one."""
    if group_size is None:
        return NumberFormat(bits, kind)
    is_nvfp4 = (bits, kind, group_size) == (4, "float", FLOAT4_GROUPS["tensor_group"])
    return NumberFormat(bits, kind, "tensor_group" if is_nvfp4 else "group", group_size)


def _integers(x: Tensor, weight: Tensor) -> Tensor:
    rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
    is_few = x.is_cpu and 0 < rows.shape[0] <= most_rows().integers
    kernel = integer_kernel() if is_few and x.shape[-1] else None
    found = product_by_torch(rows, weight) if kernel is None else run_integers(kernel, rows, weight)
    return found.view(*x.shape[:-1], weight.shape[0])


def product_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product of int8 codes [m, k] and [n, k] without a kernel of this library."""
    return product_of_integers(x, weight) if not x.is_cpu or has_integer_instructions() else _in_floats(x, weight)


def _in_floats(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of codes by products of floats, in pieces that are exact."""
    is_exact = torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    dtype = torch.float32 if is_exact else torch.float64
    pieces = zip(x.split(EXACT, 1), weight.split(EXACT, 1), strict=True)
    sums = [(piece.to(dtype) @ columns.to(dtype).t()).int() for piece, columns in pieces]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.int32)


def _shown(x: Tensor, codes: Tensor, *rest: TorchValue) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _shown_integers(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.int32)


def _packed_rule(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, kind: str) -> str:
    """Return the rule: rows of the weight are sharded, or its columns between words and between groups."""
    length, words = x.shape[-1], codes.shape[1]
    groups = scale.shape[1] if scale.dim() == 2 else 1
    has_gap = length * bits != words * codes.element_size() * BYTE
    blocks = 1 if has_gap else gcd(length, words, groups if groups > 1 else 0)
    k, w, g = (
        f"(k_{blocks} {name}_{size // blocks}!)" for name, size in zip("ijl", (length, words, groups), strict=True)
    )
    rows = f"n {g}" if groups > 1 else "n 1"
    scales = "1" if scale.dim() == 1 else rows
    zeros = "" if zero is None else f", {scales}"
    return f"... {k} | n {w}, {scales}{zeros} -> ... n"


def _register() -> None:
    _LIBRARY.impl("packed_linear", _packed, "CompositeExplicitAutograd")
    _LIBRARY.impl("packed_linear", _shown, "Meta")
    _LIBRARY.impl("integer_linear", _integers, "CompositeExplicitAutograd")
    _LIBRARY.impl("integer_linear", _shown_integers, "Meta")
    register_rule("meshwright.packed_linear", _packed_rule)
    register_rule("meshwright.integer_linear", Rule("... k, n k -> ... n", over="sum"))


_register()
