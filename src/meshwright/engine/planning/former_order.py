"""`accepts_former_order`: calls with arguments in the order of version 0.1 still work, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def accepts_former_order(
    position: int, kind: type, former: Sequence[str], now: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for a function whose arguments were once in the order `former`.

    A call is of that order if its argument at `position` is of the type `kind`. Such a call warns and tells to write
    `now`; version 0.2 removes it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not position < len(args) <= len(former) or not isinstance(args[position], kind):
                return function(*args, **kwargs)
            warnings.warn(f"the order of the arguments is now {now}", DeprecationWarning, stacklevel=2)
            return function(**dict(zip(former, args, strict=False)), **kwargs)  # pyright: ignore[reportCallIssue]

        return call

    return decorate
