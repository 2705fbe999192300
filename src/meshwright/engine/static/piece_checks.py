"""Checks of a piece's inputs and outputs. They raise CaptureError, so that the module runs as Python."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.graph import CaptureError, Program
from meshwright.layout import TorchValue

from .._errors import StaticError
from ..recording.setting import form_of

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of inputs and outputs beside tensors: values that are compared from call to call and cannot be mutated."""


def check_plain(leaves: Iterable[Any], how: str, module: nn.Module) -> None:
    """Raise CaptureError for an object that could change without being noticed, or could hold tensors."""
    strange = next((x for x in leaves if not isinstance(x, (Tensor, *PLAIN))), None)
    if strange is not None:
        raise CaptureError(
            f"capturing {type(module).__name__}, {how} {type(strange).__name__}",
            "a value that is not a tensor and may differ from call to call",
            "a program would keep the value from the recording",
            "use tensors, in tuples, lists and dicts",
        )


def form_of_call(args: Sequence[Any]) -> Hashable:
    """Return the structure of the arguments. Raises CaptureError for one that cannot be compared from call to call."""
    try:
        return form_of(args)
    except StaticError as error:
        raise CaptureError(error.asked, error.found, error.why, error.write) from error


def check_mappings(out: TorchValue, module: nn.Module) -> None:
    """Raise CaptureError for results in mappings other than dict, which programs do not make."""
    if isinstance(out, Mapping) and type(out) is not dict:
        raise CaptureError(
            f"capturing {type(module).__name__}",
            f"results in a {type(out).__name__}",
            "a program returns tuples, lists and dicts only",
            "return a dict",
        )
    if isinstance(out, (tuple, list, dict)):
        for item in out.values() if isinstance(out, dict) else out:
            check_mappings(item, module)


def check_arguments_left_alone(program: Program, module: nn.Module) -> None:
    """Raise CaptureError for a module that writes to its arguments: autograd must see the write."""
    written = {x for x, _ in program.writes}
    if any(i.value in written for i in program.inputs if i.role == "batch"):
        raise CaptureError(
            f"capturing {type(module).__name__}",
            "a write to its argument",
            "autograd must see the write to an argument, and a program hides it",
            "return a new tensor",
        )
