"""`nn.TransformerEncoder` with padded sequences: zeros at the padded positions if one device gives zeros.

In evaluation mode, torch may pack the sequences into a nested tensor and pad the result with zeros. It does so unless
an argument has `__torch_function__`, as a DistTensor has. Here torch's own code runs on stand-ins for the arguments, to
find out whether it would pack them. If so, the layers run on padded sequences, and then the padded positions are set to
zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue

from ..conversion.python_values import gather_everywhere
from ..core.dist_tensor import DistTensor, FakeDistTensor
from ..torch_hooks import interception_on, no_interception
from .torch_hooks import intercept_encoders

Forward: TypeAlias = Callable[..., Tensor]
"""The method `forward` of `nn.TransformerEncoder`."""


class _Reached(Exception):
    """The stand-in for a layer was called with a nested tensor or with a dense one."""

    def __init__(self, is_nested: bool) -> None:
        super().__init__()
        self.is_nested = is_nested


class _StandIn:
    """A module whose tensors are plain and empty; the first call of a layer raises `_Reached`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> TorchValue:
        found = getattr(self._module, name)
        if isinstance(found, Tensor):
            with no_interception():
                return torch.empty(0, dtype=found.dtype, device=found.device, requires_grad=found.requires_grad)
        if isinstance(found, nn.ModuleList):
            return [_StandIn(layer) for layer in found]
        return _StandIn(found) if isinstance(found, nn.Module) else found

    def __call__(self, x: Tensor, **kwargs: TorchValue) -> Tensor:
        raise _Reached(x.is_nested)


class _WithoutNorm:
    """An encoder without its last layer, which one device calls on the zeros."""

    norm = None

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> TorchValue:
        return getattr(self._encoder, name)


def _packs(own: Forward, encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor) -> bool:
    """True if the encoder would pack the sequences on one device."""
    with no_interception():
        wants = src.requires_grad
    one_feature = torch.zeros((*src.shape[:-1], 1), dtype=src.dtype, device=src.device).requires_grad_(wants)
    try:
        own(_StandIn(encoder), one_feature, mask, padding)
    except _Reached as reached:
        return reached.is_nested
    return False


def _is_distributed(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> bool:
    tensors = (src, padding, *encoder.parameters())
    return any(isinstance(t, DistTensor) and not isinstance(t, FakeDistTensor) for t in tensors)


def _encode(
    own: Forward,
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool | None,
) -> Tensor:
    if padding is None or encoder.training or not interception_on() or not _is_distributed(encoder, src, padding):
        return own(encoder, src, mask, padding, is_causal)
    with torch.no_grad():
        padded = gather_everywhere(padding).bool()
    if not _packs(own, encoder, src, mask, padded):
        return own(encoder, src, mask, padding, is_causal)
    lengths = padded.logical_not().sum(1, keepdim=True)
    padded = torch.arange(padded.shape[1], device=padded.device) >= lengths  # packing keeps the first `lengths`
    out = own(_WithoutNorm(encoder), src, mask, padded, is_causal).masked_fill(padded.unsqueeze(-1), 0.0)
    return out if encoder.norm is None else encoder.norm(out)


intercept_encoders(_encode)
