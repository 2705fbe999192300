"""Functions that the planner does not see: they are about a tensor rather than about its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, Any, Any, Any], Any]
"""`handler(func, types, args, kwargs)`; gives NotImplemented to leave the call to the planner."""

HANDLERS: dict[Any, Handler] = {}


def handles(*funcs: Any) -> Callable[[Handler], Handler]:
    """Makes a function the handler of `funcs`."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register
