"""Rules of quantized numbers: products of codes, products of float8 with scales, and fake quantization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.dim_names import dim_names, operand_text, sized_name
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, Rule

INT8_READ_LENGTH = 16
"""Elements of the contraction that the int8 kernel reads at a time; it reads beyond the end of a shorter rest."""
INT4_BLOCK = 64
"""Rows that the packed int4 layout interleaves, on every processor that torch supports."""
FLOAT8_BLOCK = 16
"""Kernels for float8 on GPUs take rows and columns that are multiples of this."""


def int8_rule(x: Tensor, weight: Tensor, scales: Tensor) -> Rule:
    """Return the rule of the int8 product. The kernel reads whole runs of the contraction from contiguous rows."""
    runs, rest = divmod(x.shape[1], INT8_READ_LENGTH)
    k = f"k_{x.shape[1]}!" if rest or not runs else f"({sized_name('k', runs)} {sized_name('r', INT8_READ_LENGTH)}!)"

    def form(call: LocalCall, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.contiguous(), scales)

    return Rule(f"m {k} * n {k} * n -> m n", forms={} if rest else {sized_name("k", runs): form})


def int4_rule(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> str | None:
    """Return the rule of the int4 product; rows of the packed weight may be sharded between blocks."""
    rows = packed.shape[0]
    if rows % INT4_BLOCK:
        return "m k! | n! h!, g! n! two! -> m n"
    n = f"({sized_name('n', rows // INT4_BLOCK)} {sized_name('i', INT4_BLOCK)}!)"
    return f"m k! | {n} h!, g! {n} two! -> m {n.replace('!', '')}"


def scaled_rule(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    *rest: TorchValue,
    **kwargs: TorchValue,
) -> Rule | None:
    """Return the rule of `_scaled_mm`, a product of float8 numbers with one scale each, or one for rows and columns.

    Parts are multiples of the kernels' blocks, and keep the order in memory that the kernels need: rows of `x`, and
    columns of `w`. None if the result is scaled again.
    """
    if scale_result is not None or w.dim() != 2:
        return None
    k, n = _blocks("k", w.shape[0]), _blocks("n", w.shape[1])
    rows = operand_text(["1"] * scale_x.dim()) if scale_x.numel() == 1 else "m 1"
    columns = operand_text(["1"] * scale_w.dim()) if scale_w.numel() == 1 else f"1 {n}"
    operands = [f"m {k}", f"{k} {n}", rows, columns]
    names = ["m", *(_outer(name, size) for name, size in zip("kn", w.shape, strict=True) if size % FLOAT8_BLOCK == 0)]
    if bias is not None:  # each term of a sum over parts of k would add it
        operands = [f"m {_whole(k)}", f"{_whole(k)} {n}", rows, columns, n]
        names = [name for name in names if not name.startswith("k")]
    text = f"{', '.join(operands)} -> m {n.replace('!', '')}"
    return Rule(text, over="sum", forms=dict.fromkeys(names, scaled_product))


def _whole(dim: str) -> str:
    return dim.replace(" ki", "! ki") if dim.startswith("(") else dim


def _outer(name: str, size: int) -> str:
    return sized_name(name, size // FLOAT8_BLOCK)


def _blocks(name: str, size: int) -> str:
    """Return the text of a dim that is sharded between blocks; it is whole if it is no multiple of a block."""
    if size % FLOAT8_BLOCK or not size:
        return f"{name}!"
    return f"({_outer(name, size)} {sized_name(name + 'i', FLOAT8_BLOCK)}!)"


def scaled_product(call: LocalCall, x: Tensor, w: Tensor, *rest: TorchValue, **kwargs: TorchValue) -> Tensor:
    """Run the product on parts in the memory order of its kernels."""
    return torch.ops.aten._scaled_mm(x.contiguous(), w.t().contiguous().t(), *rest, **kwargs)


def fake_rule(x: Tensor, *rest: TorchValue) -> str:
    """Return the rule of fake quantization with one scale: a number, or a tensor of one element."""
    scales = [operand_text(["1"] * each.dim()) for each in rest if isinstance(each, Tensor)]
    names = operand_text(dim_names(x))
    return f"{', '.join([names, *scales])}{'' if scales else ','} -> {names}"


def fake_channels_rule(x: Tensor, scale: Tensor, zero: Tensor, axis: int, *rest: TorchValue) -> str:
    """Return the rule of fake quantization with a scale and a zero point for each index of a dim."""
    names = dim_names(x)
    return f"{operand_text(names)}, {names[axis]}, {names[axis]} -> {operand_text(names)}"


def with_mask(rule: Callable[..., str]) -> Entry:
    """Return the rule of a form that also returns a mask: True where the gradient passes."""

    def entry(*args: TorchValue) -> str:
        text = rule(*args)
        return f"{text} ; {text.rpartition('-> ')[2]}"

    return entry


QUANTIZED: dict[str, Entry] = {
    "aten._weight_int8pack_mm": int8_rule,
    "aten._weight_int4pack_mm_for_cpu": int4_rule,
    "aten._scaled_mm": scaled_rule,
    "aten.fake_quantize_per_tensor_affine": fake_rule,
    "aten.fake_quantize_per_channel_affine": fake_channels_rule,
    "aten._fake_quantize_learnable_per_tensor_affine": fake_rule,
    "aten._fake_quantize_learnable_per_channel_affine": fake_channels_rule,
    "aten.fake_quantize_per_tensor_affine_cachemask": with_mask(fake_rule),
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams": with_mask(fake_rule),
    "aten.fake_quantize_per_channel_affine_cachemask": with_mask(fake_channels_rule),
    "aten.fake_quantize_per_tensor_affine_cachemask_backward": "... | ... -> ...",
    "aten.fake_quantize_per_channel_affine_cachemask_backward": "... | ... -> ...",
}
