"""Private names of torch that this package uses, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from meshwright.layout import EFFICIENT, FLASH, FLASH_ON_CPU, TorchValue, platform_of

Operator = OpOverload
"""An ATen operator overload: `torch.ops.aten.add.Tensor`. Its class and `_schema` have no public name."""


def schema_of(op: OpOverload) -> TorchValue:
    """Return the schema: arguments with names, types and alias sets. torch has no public name for it."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """Return the overload name, such as `Tensor` for `aten.add.Tensor`."""
    return op._overloadname


def register_meta_kernel(op: str, shapes: Callable[..., Any]) -> None:
    """Register a meta kernel for an ATen operator if torch has none; only a private name says if it has one."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "Meta"):
        _ON_META.impl(op, shapes)


def can_assert_on(device: torch.device) -> bool:
    """True if a device has the kernel of `torch.ops.aten._assert_async`, which torch has for few devices.

    Programs are also recorded for devices that this process does not have. The platform tells about those.
    """
    if device.type == "meta" or platform_of(device).asserts:
        return True
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::_assert_async.msg", key)


_ON_META = torch.library.Library("aten", "IMPL", "Meta")


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A fused kernel of attention, forward and backward, of operands (batch, heads, length, features).

    forward(query, key, value, mask, is_causal, scale) returns the result and the log-sums (batch, heads, length).
    backward(grad, query, key, value, out, log-sums, mask, is_causal, scale) returns the gradients of queries, keys and
    values. `out` and the log-sums may be those of more keys than `key` has.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def attention_kernel(query: Tensor, mask: Tensor | None, channels: int = 0) -> AttentionKernel | None:
    """Return the fused kernel that returns log-sums for such operands, or None. `channels` are those of values.

    It follows the device and the flags of `torch.nn.attention.sdpa_kernel`. torch's public function returns no
    log-sums, and only its private operators take those of a merged result.
    """
    device, flags = query.device, torch.backends.cuda
    half = query.dtype in (torch.float16, torch.bfloat16)
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return None
    kernels = platform_of("cpu" if device.type == "meta" else device).attention(device)
    if FLASH_ON_CPU in kernels:
        return _FLASH_ON_CPU if flags.flash_sdp_enabled() else None
    fits_flash = half and mask is None and max(query.shape[-1], channels) <= 256
    if FLASH in kernels and fits_flash and flags.flash_sdp_enabled():
        return _FLASH
    is_supported = EFFICIENT in kernels and (half or query.dtype == torch.float32)
    return _EFFICIENT if is_supported and flags.mem_efficient_sdp_enabled() else None


def _flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def _flash_on_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    is_causal, scale = call
    op = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return op(grad, q, k, v, out, total, 0.0, is_causal, attn_mask=mask, scale=scale)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, total, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, total


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    is_causal, scale = call
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # only dropout reads it
    lengths = (None, None, q.shape[-2], k.shape[-2])
    op = _ATEN._scaled_dot_product_flash_attention_backward
    return op(grad, q, k, v, out, total.contiguous(), *lengths, 0.0, is_causal, seed, seed, scale=scale)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _aligned(mask, q, k)
    out, total, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    return out, total.narrow(-1, 0, q.shape[-2])


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of NVIDIA reads log-sums in groups of 32, and rows beyond the last one have infinite log-sums."""
    is_causal, scale = call
    bias, beyond = _aligned(mask, q, k), 0 if torch.version.hip else -q.shape[-2] % 32
    total = F.pad(total.contiguous(), (0, beyond), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # only dropout reads it
    wanted = [True, True, True, False]
    op = _ATEN._scaled_dot_product_efficient_attention_backward
    return op(grad, q, k, v, bias, out, total, seed, seed, 0.0, wanted, is_causal, scale=scale)[:3]


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask for all heads; the kernel reads rows of it that begin at multiples of 16 elements."""
    if mask is None:
        return None
    columns = k.shape[-2]
    rows = F.pad(mask, (0, -columns % 16)).narrow(-1, 0, columns)
    return rows.expand(*q.shape[:-1], columns)


_ATEN: TorchValue = torch.ops.aten
_FLASH_ON_CPU = AttentionKernel(_flash_on_cpu, _flash_on_cpu_backward)
_FLASH = AttentionKernel(_flash, _flash_backward)
_EFFICIENT = AttentionKernel(_efficient, _efficient_backward)
