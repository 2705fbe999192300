"""`same_numbers`: the context in which results do not depend on the mesh, the batch or the phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor, backward_running, interception_on

from . import calls
from ._errors import refusal
from .functions import ALIASES, REPLACED
from .kernel_check import check_kernels
from .operators import settled


class SameNumbers(TorchFunctionMode):
    """Context in which calls of torch run with sums in a fixed order, on plain and on distributed tensors."""

    def __enter__(self) -> SameNumbers:
        check_kernels()
        return super().__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: TorchValue, args: TorchValue = (), kwargs: TorchValue = None
    ) -> TorchValue:
        named: dict[str, Any] = kwargs or {}
        if _is_internal() or calls.is_attribute(func):
            return func(*args, **named)
        name = calls.name_of(func)
        replacement = REPLACED.get(name)
        if replacement is not None:
            return replacement(*args, **{ALIASES.get(key, key): value for key, value in named.items()})
        calls.check_exact(name, args, named)
        if name in calls.BROADCASTING:
            args, named = calls.spread_operands(name, args, named)
        elif name not in calls.EXACT and calls.is_of_numbers(args, named):
            raise refusal(name, "it is not known to round in a fixed order")
        out = func(*args, **named)
        return settled(out) if type(out) is DistTensor and out.spec.layout.partial else out


def _is_internal() -> bool:
    """True for a call on local parts, or inside a backward pass: gradients are derived when a call is recorded."""
    return not interception_on() or (backward_running() != -1 and not torch.is_grad_enabled())


def same_numbers() -> SameNumbers:
    """Return a context in which results do not depend on the mesh, the batch size or the phase, bit for bit.

    Enter it on every rank, also for the backward pass and the step of the optimizer. A call that cannot be given a
    fixed order raises SameNumbersError. `docs/concepts/same_numbers.md` says what is guaranteed.

    Example:
        with mw.same_numbers():
            loss = model(batch)
            loss.backward()
            optimizer.step()
    """
    return SameNumbers()
