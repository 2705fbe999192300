"""Handlers of functions that draw from a random generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction
from ..autograd.intercepted_call import argument_at, named_arguments
from ..capture.call_capture import autocast_dtype
from ..conversion.local_parts import is_empty
from ..core.computation_numbers import note_drawing
from ..core.handler_registry import handles
from ..torch_hooks import OperatorPacket
from .counter_draws import draw_bits
from .random_draws import LIKE, current_random_source, dropout, dropout_arguments, fill_random, like_random

_FILLS = ["uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "bernoulli_"]
_FILLING: list[OperatorPacket] = [getattr(torch.ops.aten, n) for n in _FILLS]
_WITHOUT_TENSORS = [getattr(op, o) for op in _FILLING for o in op.overloads() if not o.endswith(("out", "Tensor"))]
handles(*[getattr(Tensor, n) for n in _FILLS], *_WITHOUT_TENSORS)(fill_random)


@handles(init.uniform_, init.normal_, init.constant_)
def _initialise(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Initialise a tensor by its own method.

    Functions of `nn.init` inspect the tensor before they turn gradients off.
    """
    names = {"uniform_": ("a", "b"), "normal_": ("mean", "std"), "constant_": ("val",)}[func.__name__]
    given = named_arguments(("tensor", *names), args, kwargs)
    x = given.pop("tensor")
    fill = {"uniform_": x.uniform_, "normal_": x.normal_, "constant_": x.fill_}[func.__name__]
    defaults = {"a": 0.0, "b": 1.0, "mean": 0.0, "std": 1.0}
    with torch.no_grad():
        return fill(*[given.pop(n, defaults.get(n)) for n in names], **given)


@handles(init.kaiming_uniform_)
def _initialise_kaiming(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    names = ("tensor", "a", "mode", "nonlinearity", "generator")
    given = named_arguments(names, args, kwargs)
    x, mode = given["tensor"], given.get("mode", "fan_in")
    fans = dict(zip(("fan_in", "fan_out"), init._calculate_fan_in_and_fan_out(x), strict=True))
    gain = init.calculate_gain(given.get("nonlinearity", "leaky_relu"), given.get("a", 0))
    bound = 3.0**0.5 * gain / fans[mode] ** 0.5
    with torch.no_grad():
        return x.uniform_(-bound, bound, generator=given.get("generator"))


handles(*LIKE)(like_random)
handles(F.dropout, torch.dropout, torch.ops.aten.dropout.default)(dropout)

_WITH_BATCH = {F.dropout1d: 3, F.dropout3d: 5}
"""Function → the number of dims of an input that has a batch; the function adds one to any other input."""


@handles(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.ops.aten.feature_dropout.default)
def _drop_features(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Drop whole channels, with a mask of one number for each."""
    x = argument_at(args, kwargs, 0, "input")
    p, train, inplace = dropout_arguments(args[1:], kwargs)
    channels = 2 if x.dim() == _WITH_BATCH.get(func, x.dim()) else 1
    refused = x.dim() < channels or (func is F.dropout1d and x.dim() not in (2, 3))
    if not train or not 0 < p < 1 or refused or is_empty(x):
        return NotImplemented
    ones = [1] * (x.dim() - channels)
    mask = x.new_empty([*x.shape[:channels], *ones]).bernoulli_(1 - p).div_(1 - p)
    return x.mul_(mask) if inplace else x * mask


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@handles(F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
def _attention_with_dropout(
    func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue
) -> TorchValue:
    """Compute attention with dropout by single operators, as torch does on a CPU.

    Each operator is then sharded by its own rule. Random numbers from counters need no tensor of all weights: an
    operator of its own then computes blocks of rows.
    """
    given = named_arguments(_ATTENTION, args, kwargs)
    if not _drops_weights(given):
        return NotImplemented
    q, k, v = (given[name] for name in _ATTENTION[:3])
    lower = autocast_dtype((q, k, v))
    with torch.autocast(device_type=q.device.type, enabled=False):
        q, k, v, dtype = _wide_operands(q, k, v, lower)
        if given.get("enable_gqa"):
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scale = max(q.shape[-1], 1) ** -0.5 if given.get("scale") is None else given["scale"]
        if _runs_in_blocks(q, k, v, given):
            return _attention_in_blocks(q, k, v, given, scale).to(dtype)
        scores = (q * scale**0.5) @ (k * scale**0.5).mT
        weights = torch.ops.aten._safe_softmax.default(_masked(scores, given), -1)
        return (F.dropout(weights, given["dropout_p"]) @ v).to(dtype)


def _drops_weights(given: dict[str, TorchValue]) -> bool:
    """True for a call with dropout. torch refuses a mask together with `is_causal`."""
    is_refused = given.get("is_causal") and given.get("attn_mask") is not None
    return (given.get("dropout_p") or 0) > 0 and not is_refused


def _wide_operands(
    q: Tensor, k: Tensor, v: Tensor, lower: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Return queries, keys and values in at least float32, and the dtype of the result under autocast to `lower`."""
    if lower is not None:
        q, k, v = (x.to(lower) if x.dtype != torch.float64 else x for x in (q, k, v))
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    return q, k, v, dtype


def _runs_in_blocks(q: Tensor, k: Tensor, v: Tensor, given: dict[str, TorchValue]) -> bool:
    """True if the numbers come from counters, and the operator that draws them in blocks accepts the operands."""
    if current_random_source() != "counter" or not given["dropout_p"] < 1:
        return False
    mask = given.get("attn_mask")
    mask_fits = mask is None or not (mask.requires_grad or mask.dim() > 4)
    is_empty_call = 0 in (*q.shape, *k.shape)
    fits = q.dim() == k.dim() == 4 and q.shape[:2] == k.shape[:2] and k.shape[:-1] == v.shape[:-1]
    return fits and mask_fits and not is_empty_call


def _attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, given: dict[str, TorchValue], scale: float) -> Tensor:
    p, is_causal = float(given["dropout_p"]), bool(given.get("is_causal"))
    note_drawing(q.device, None)
    bits = draw_bits()
    op = torch.ops.meshwright.attention_with_dropout.default
    return op(q, k, v, given.get("attn_mask"), bits, p, is_causal, scale)


def _masked(scores: Tensor, given: dict[str, TorchValue]) -> Tensor:
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
