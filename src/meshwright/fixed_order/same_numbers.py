"""`same_numbers`: the context in which results do not depend on the mesh, the batch or the phase."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.layout import TorchValue
from meshwright.tensor import (
    Operator,
    OperatorPacket,
    active_function_modes,
    around_backward,
    backward_running,
    in_capture,
    interception_on,
    map_tensors,
    parts_recorded,
)

from . import calls
from ._errors import refusal
from .functions import ALIASES, REPLACED
from .kernel_check import check_kernels
from .operators import settled
from .piece_products import longest_piece
from .piece_sums import sum_kernel

_only_recordings: ContextVar[bool] = ContextVar("only_recordings", default=False)


class SameNumbers(TorchFunctionMode):
    """Context in which calls of torch run with sums in a fixed order, on plain and on distributed tensors.

    Two contexts are equal: programs are recorded in the same way inside both.
    """

    def __enter__(self) -> SameNumbers:
        check_kernels()
        longest_piece()  # memoized now
        sum_kernel()
        return super().__enter__()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameNumbers)

    def __hash__(self) -> int:
        return hash(SameNumbers)

    def __repr__(self) -> str:
        return "same_numbers()"

    def __torch_function__(
        self, func: Callable[..., Any], types: TorchValue, args: TorchValue = (), kwargs: TorchValue = None
    ) -> TorchValue:
        named: dict[str, Any] = kwargs or {}
        name = calls.name_of(func)
        if name in calls.ATTRIBUTES or _is_internal():
            return func(*args, **named)
        if isinstance(func, (Operator, OperatorPacket)) and _is_captured(func):
            return map_tensors(settled, func(*args, **named))
        if name in calls.BACKWARD:
            return self._backward(name, func, args, named)
        return self._run(name, func, args, named)

    def _run(self, name: str, func: Callable[..., Any], args: TorchValue, named: dict[str, Any]) -> TorchValue:
        """Return the result of a function of the forward pass or the optimizer."""
        replacement = REPLACED.get(name)
        if replacement is not None:
            return replacement(*args, **{ALIASES.get(key, key): value for key, value in named.items()})
        calls.check_exact(name, args, named)
        if name in calls.BROADCASTING:
            args, named = calls.spread_operands(name, args, named)
        elif name not in calls.EXACT and calls.is_of_numbers(args, named):
            raise refusal(name, "it is not known to round in a fixed order")
        return settled(func(*args, **named))

    def _backward(self, name: str, func: Callable[..., Any], args: TorchValue, named: TorchValue) -> TorchValue:
        """Return the result of a function that runs a backward pass; calls that a checkpoint repeats are in the block.

        Raises SameNumbersError for gradients of gradients, and in a capture, whose program would hold the sums of
        unsharded tensors.
        """
        calls.check_exact(name, args, named)
        if in_capture():
            raise refusal(
                f"{name} in the forward pass of a program", "its sums would ignore the layouts of the program"
            )
        token = around_backward.set(lambda: self)
        try:
            return func(*args, **named)
        finally:
            around_backward.reset(token)


def _is_internal() -> bool:
    """True for a call on local parts, or inside a backward pass: gradients are derived when a call is recorded."""
    if in_capture():
        return False
    derives = backward_running() != -1 and not torch.is_grad_enabled()
    return not interception_on() or derives or (_only_recordings.get() and not parts_recorded())


def _is_captured(func: Operator | OperatorPacket) -> bool:
    """True for an operator of a captured program, whose call was checked then, and for operators of this package."""
    return str(func).startswith("meshwright.") or (parts_recorded() and not in_capture())


@contextmanager
def only_recordings() -> Generator[None]:
    """Apply `same_numbers` only to calls that are captured or recorded inside the context, not to the library's own."""
    token = _only_recordings.set(True)
    try:
        yield
    finally:
        _only_recordings.reset(token)


def in_same_numbers() -> bool:
    """True inside a block of `same_numbers`."""
    return any(isinstance(mode, SameNumbers) for mode in active_function_modes())


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
