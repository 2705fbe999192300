"""Handlers of functions that the planner does not see, because they concern a tensor rather than its numbers."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction

Handler = Callable[[TorchValue, TorchValue, TorchValue, TorchValue], TorchValue]
"""`handler(func, types, args, kwargs)` returns the result, or NotImplemented to leave the call to the planner."""

HANDLERS: dict[TorchFunction, Handler] = {}
"""Function → its handler, called before the planner."""

DIRECT: dict[TorchFunction, Handler] = {}
"""Handlers of functions that do not read a tensor's numbers, so a view need not be read again for them."""


def handles(*funcs: TorchFunction, numbers: bool = True) -> Callable[[Handler], Handler]:
    """Register a function as the handler of `funcs`; `numbers` is True if these read the numbers of their arguments."""

    def register(handler: Handler) -> Handler:
        (HANDLERS if numbers else DIRECT).update(dict.fromkeys(funcs, handler))
        return handler

    return register
