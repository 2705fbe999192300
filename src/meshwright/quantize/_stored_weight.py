"""The stored form of a quantized weight: the tensors of a layer, as compressed-tensors names and packs them.

form              tensors
pack-quantized    weight_packed: int32 words of a row; weight_scale; weight_shape; weight_zero_point if asymmetric
int-quantized     weight: int8 codes; weight_scale; weight_zero_point if asymmetric
float-quantized   weight: float8 codes; weight_scale
mxfp4-pack-…      weight_packed: two codes a byte; weight_scale: the exponents of powers of two, as bytes
nvfp4-pack-…      weight_packed: two codes a byte; weight_scale: float8; weight_global_scale, which divides the scales

Packed integers whose groups are not neighbours, as GPTQ with act-order makes them, have a `weight_g_idx` too: the group
of each column. Integers have the form "int-quantized" if the inputs are quantized too, else "pack-quantized". nf4 is
always packed in the same way, but compressed-tensors does not know it. Inputs whose scale is not computed at each call
have an `input_scale`. A layer holds these tensors as buffers, so a checkpoint is its state. A weight may be a stack of
matrices [e, n, k]. Then each tensor but those for the whole weight has the dim e first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from meshwright.layout import Dim, Layout, Product, Spec, axes_of
from meshwright.tensor import DistTensor, distribute_as

from ._packing import pack, pack_float4, packed_length, unpack, unpack_float4
from ._rounding import FLOAT8, code_dtype, float4_divisor, to_values
from ._scheme import Scheme

Stored = dict[str, Tensor]
INPUT_SCALE = "input_scale"
PACKED, SCALE, ZERO, SHAPE, WEIGHT = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight"
GLOBAL_SCALE = "weight_global_scale"
GROUP_OF = "weight_g_idx"
EXPONENT_SHIFT = 23
"""Position of the exponent in a float32."""


def stored_form(scheme: Scheme) -> str:
    """Return the form in which the weights of a scheme are stored."""
    if scheme.weights.is_float4:
        return f"{'mxfp4' if scheme.weights.strategy == 'group' else 'nvfp4'}-pack-quantized"
    if scheme.weights.type == "float":
        return "float-quantized"
    has_bytes = scheme.weights.type == "int" and scheme.input_activations is not None
    return "int-quantized" if has_bytes else "pack-quantized"


def is_packed(scheme: Scheme) -> bool:
    return stored_form(scheme) == "pack-quantized"


def _has_packed_zeros(scheme: Scheme) -> bool:
    """True if zero points are packed. One for the whole weight is stored as its code."""
    return is_packed(scheme) and scheme.weights.strategy != "tensor"


def store(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Stored:
    """Return the tensors that hold a quantized weight."""
    bits = scheme.weights.num_bits
    if scheme.weights.is_float4:
        return {PACKED: pack_float4(codes), **_store_float4_scale(scale, scheme)}
    if not is_packed(scheme):
        found = {WEIGHT: codes, SCALE: scale}
    else:
        found = {PACKED: pack(codes, bits), SCALE: scale, SHAPE: torch.tensor(tuple(codes.shape), device=codes.device)}
    if zero is not None and _has_packed_zeros(scheme):
        zero = pack(zero.transpose(-2, -1), bits).transpose(-2, -1).contiguous()
    return found if zero is None else {**found, ZERO: zero}


def _store_float4_scale(scale: Tensor, scheme: Scheme) -> Stored:
    """Return the tensors that hold float32 scales of mxfp4 or nvfp4, without rounding."""
    if scheme.weights.strategy == "group":
        return {SCALE: (scale.view(torch.int32) >> EXPONENT_SHIFT).to(torch.uint8)}
    divisor = float4_divisor(scale)
    return {SCALE: (scale * divisor).to(FLOAT8), GLOBAL_SCALE: divisor}


def _float4_scale(stored: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the float32 scales: the inverse of `_store_float4_scale`."""
    if scheme.weights.strategy == "group":
        return (stored[SCALE].to(torch.int32) << EXPONENT_SHIFT).view(torch.float32)
    return stored[SCALE].float() / stored[GLOBAL_SCALE]


def codes_in(stored: Mapping[str, Tensor], scheme: Scheme, length: int) -> Tensor:
    """Return the codes of a stored weight with rows of `length`."""
    return codes_of(stored[WEIGHT if WEIGHT in stored else PACKED], scheme.weights.num_bits, length)


def codes_of(words: Tensor, bits: int, length: int) -> Tensor:
    """Return the codes of rows of `length` that are stored as int32 words, as bytes with two floats, or one by one."""
    if words.dtype is torch.int32:
        return unpack(words, bits, length)
    return unpack_float4(words) if words.dtype is torch.uint8 else words


def scale_in(stored: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the scale of a stored weight as numbers."""
    return _float4_scale(stored, scheme) if scheme.weights.is_float4 else stored[SCALE]


def zero_in(stored: Mapping[str, Tensor], scheme: Scheme, rows: int) -> Tensor | None:
    """Return the zero points of a stored weight of so many rows, as int8 codes; None if it has none."""
    zero = stored.get(ZERO)
    if zero is None or zero.dtype is not torch.int32:
        return zero
    return unpack(zero.transpose(-2, -1), scheme.weights.num_bits, rows).transpose(-2, -1)


def values_in(stored: Mapping[str, Tensor], scheme: Scheme, length: int) -> Tensor:
    """Return the weight [n, k] or [e, n, k] that is stored, in the dtype of its scale; float32 for floats of 4 bits."""
    codes = codes_in(stored, scheme, length)
    scale, zero = scale_in(stored, scheme), zero_in(stored, scheme, codes.shape[-2])
    return to_values(codes, scale, zero, scheme.weights, stored.get(GROUP_OF))


def stored_shapes(rows: int, columns: int, scheme: Scheme, stack: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that hold a weight [*stack, rows, columns]."""
    weights = scheme.weights
    groups = columns // weights.group_size if weights.group_size else 1
    scale = (1,) if weights.strategy == "tensor" else (*stack, rows, groups)
    found: dict[str, tuple[int, ...]]
    if weights.is_float4:
        found = {PACKED: (*stack, rows, columns // 2), SCALE: scale}
        found |= {GLOBAL_SCALE: (1,)} if weights.strategy == "tensor_group" else {}
    elif not is_packed(scheme):
        found = {WEIGHT: (*stack, rows, columns), SCALE: scale}
    else:
        packed = (*stack, rows, packed_length(columns, weights.num_bits))
        found = {PACKED: packed, SCALE: scale, SHAPE: (len(packed),)}
    if not weights.symmetric:
        packed_rows = packed_length(rows, weights.num_bits)
        found[ZERO] = (*stack, packed_rows, groups) if _has_packed_zeros(scheme) else scale
    return found | ({INPUT_SCALE: (1,)} if has_input_scale(scheme) else {})


def has_input_scale(scheme: Scheme) -> bool:
    """True if the scale of the inputs is stored."""
    inputs = scheme.input_activations
    return inputs is not None and not inputs.dynamic


def stored_dtypes(scheme: Scheme, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that may hold a weight of `dtype`."""
    zero = torch.int32 if _has_packed_zeros(scheme) else torch.int8
    codes = code_dtype(scheme.weights)
    if scheme.weights.is_float4:
        scale = torch.uint8 if scheme.weights.strategy == "group" else FLOAT8
        return {PACKED: torch.uint8, SCALE: scale, GLOBAL_SCALE: torch.float32, INPUT_SCALE: dtype}
    found = {PACKED: torch.int32, WEIGHT: codes, SCALE: dtype, INPUT_SCALE: dtype, SHAPE: torch.int64, ZERO: zero}
    return found | {GROUP_OF: torch.int32}


def stored_layouts(shapes: Mapping[str, Sequence[int]], weight: Spec) -> dict[str, Layout]:
    """Return the layouts of stored tensors: that of the weight, where their elements correspond.

    A packed row is sharded like the weight, between words. The scales of a row are sharded if every rank has the same
    number of groups, else whole. If the groups are not neighbours, each rank has the scales of all groups.
    """
    found = {name: _stored_layout(name, tuple(shape), weight) for name, shape in shapes.items()}
    if GROUP_OF not in shapes:
        return found
    groups_whole = {name: Layout((found[name].dims[0], ())) for name in (SCALE, ZERO) if name in shapes}
    return found | groups_whole


def _stored_layout(name: str, shape: tuple[int, ...], weight: Spec) -> Layout:
    if name == GROUP_OF:
        return Layout((weight.layout.dims[1],))
    if len(shape) != weight.ndim:
        return Layout(((),) * len(shape))
    *stack, rows, columns = weight.layout.dims
    first = rows if shape[-2] == weight.shape[-2] else ()
    last = columns if shape[-1] == weight.shape[-1] else _coarser(name, shape[-1], weight, columns)
    return Layout((*stack, first, last))


def _coarser(name: str, length: int, weight: Spec, columns: Dim) -> Dim:
    """Return the axes that shard a dim with one element for several columns of the weight."""
    if isinstance(columns, Product):
        return ()
    ranks = prod(weight.mesh.sizes[axis] for axis in axes_of(columns))
    whole = length % ranks == 0 and weight.shape[-1] % ranks == 0
    return columns if whole or name == PACKED else ()


def placed_like(weight: Tensor, stored: Stored) -> Stored:
    """Return the stored tensors in layouts that follow from the weight's; plain tensors if the weight is plain."""
    if not isinstance(weight, DistTensor):
        return stored
    layouts = stored_layouts({name: tensor.shape for name, tensor in stored.items()}, weight.spec)
    return {name: distribute_as(tensor, weight.spec.mesh, layouts[name]) for name, tensor in stored.items()}
