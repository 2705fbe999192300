"""Functions that the planner does not see: they are about a tensor rather than about its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, Any, Any, Any], Any]
"""`handler(func, types, args, kwargs)`; gives NotImplemented to leave the call to the planner."""

HANDLERS: dict[Any, Handler] = {}
"""Function → its handler, asked before the planner."""

DIRECT: dict[Any, Handler] = {}
"""Handlers of functions that do not look at a tensor's numbers: a view need not be read again for them."""


def handles(*funcs: Any, numbers: bool = True) -> Callable[[Handler], Handler]:
    """Makes a function the handler of `funcs`; `numbers` tells that these look at the numbers of their arguments."""

    def register(handler: Handler) -> Handler:
        (HANDLERS if numbers else DIRECT).update(dict.fromkeys(funcs, handler))
        return handler

    return register
