"""Operators of a script that several simulated ranks run: each is defined once, by the first rank.

torch replaces an operator whose name is defined again, and frees it while other ranks still call it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch


class AlreadyDefined:
    """An operator that another rank has defined; further registrations for it are ignored."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _nothing if name.startswith("register_") else getattr(self.operator, name)


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Accept the arguments of a registration; as a decorator, return the function unchanged."""
    functions = [arg for arg in args if callable(arg)]
    return functions[0] if functions else lambda fn: fn


@contextmanager
def defined_once(rank: Callable[[], int]) -> Generator[None]:
    """Define each name by `torch.library.custom_op` only once inside the block, on the first rank that does so."""
    define: Any = torch.library.custom_op
    known: dict[str, tuple[int, Any]] = {}

    def once(name: str, fn: Callable[..., Any] | None = None, /, **how: Any) -> Any:
        if fn is None:
            return lambda fn: once(name, fn, **how)
        definer, operator = known.get(name, (rank(), None))
        if definer != rank():
            return AlreadyDefined(operator)
        known[name] = rank(), define(name, fn, **how)
        return known[name][1]

    torch.library.custom_op = once
    try:
        yield
    finally:
        torch.library.custom_op = define
