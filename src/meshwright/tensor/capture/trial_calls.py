"""Trial calls without the caller's values: dtypes of results, missing kernels, and reasons of failed captures."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from meshwright.layout import TorchValue, hint

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import DynamicShapeError, ValueNeededError, imagining, no_interception, no_modes, seeded_tag
from .call_capture import CAST, CapturedNode, sizes_of, spec_if_distributed

_USUAL = {torch.float32, torch.float64}
"""Dtypes that every kernel has."""

_READS_NUMBER = "it reads a number from a tensor, so every rank gathers the tensor"


def dtypes_given(func: TorchFunction, args: Arguments, kwargs: NamedArguments) -> list[torch.dtype] | None:
    """Return the dtypes of the results of `func` for whole tensors under the current autocast, or None."""
    try:
        return [t.dtype for t in tensors_in(_imagined(func, args, kwargs))]
    except Exception:  # torch refuses fake tensors, in many ways
        return None


def why_not_captured(func: TorchFunction, args: Arguments, kwargs: NamedArguments, error: Exception) -> str:
    """Return the reason why the capture of a call ended with `error`, without quoting values of its arguments."""
    reason = str(error).split("\n")[0]
    is_internal = "meta" in reason.lower().split()  # the user gave no tensors on the meta device
    if not (is_internal or isinstance(error, NotImplementedError) or reason.startswith("Cannot cast ")):
        return reason  # the user's own mistake, which torch would log in a trial call
    try:
        _imagined(func, args, kwargs)
    except DynamicShapeError:
        return "the values of a tensor decide the shape of the result, so every rank gathers the tensor"
    except ValueNeededError:
        return _READS_NUMBER
    except Exception:  # torch refuses fake tensors, in many ways
        pass
    if reason.startswith("Cannot cast "):
        return _READS_NUMBER
    return "torch cannot infer the shape of the result without the values" if is_internal else reason


def _imagined(func: TorchFunction, args: Arguments, kwargs: NamedArguments) -> TorchValue:
    """Return the result of `func` for fake tensors on the devices of its whole arguments; raises the error of torch."""

    def stand_in(x: Tensor) -> Tensor:
        like = spec_if_distributed(x) or x
        return torch.empty(like.shape, dtype=like.dtype, device=x.device)

    with (
        no_modes(),
        imagining(sizes_of(args, kwargs, spec_if_distributed), always=True),
        no_interception(),
        torch.no_grad(),
    ):
        return func(*map_tensors(stand_in, args), **map_tensors(stand_in, kwargs))


def is_raised(node: CapturedNode, device: torch.device, lower: torch.dtype) -> bool:
    """True if autocast to `lower` runs the operator in float32 even if its operands are in `lower`."""

    def stand_in(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=lower if x.dtype in CAST else x.dtype, device=device)

    with no_modes(), imagining(sizes_of(node.args, node.kwargs, lambda _: None), always=True), torch.no_grad():
        try:
            out = node.op(*map_tensors(stand_in, node.args), **map_tensors(stand_in, node.kwargs))
        except Exception:  # torch refuses fake tensors, in many ways
            return False
        return any(t.dtype == torch.float32 for t in tensors_in(out))


def check_kernel(node: CapturedNode, device: torch.device) -> None:
    """Raise torch's NotImplementedError if the operator has no kernel for the dtypes of its operands.

    If a local function replaces the operator, nothing else would raise it.
    """
    dtypes = {x.dtype for x in tensors_in((node.args, node.kwargs, node.out))}
    if seeded_tag in node.op.tags or dtypes <= _USUAL:
        return

    def smallest(x: Tensor) -> Tensor:
        return torch.ones([min(hint(n), 2) for n in x.shape], dtype=x.dtype, device=device)

    with no_modes(), no_interception(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            node.op(*map_tensors(smallest, node.args), **map_tensors(smallest, node.kwargs))
        except NotImplementedError:
            raise
        except Exception:  # the other arguments do not fit such shapes
            return
