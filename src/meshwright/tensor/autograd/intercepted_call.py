"""Arguments of intercepted calls, as torch passes them to `__torch_function__`."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.layout import TorchValue


def named_arguments(names: Iterable[str], args: TorchValue, kwargs: TorchValue) -> dict[str, TorchValue]:
    """Return the arguments of a call by name; `names` are those of the first arguments, in order.

    >>> named_arguments(("input", "p", "training"), (1.0, 0.5), {"inplace": True})
    {'input': 1.0, 'p': 0.5, 'inplace': True}
    """
    return dict(zip(names, args, strict=False)) | (kwargs or {})


def argument_at(args: TorchValue, kwargs: TorchValue, place: int, *names: str) -> TorchValue:
    """Return the argument at a place of a call, or else under one of these names; None if it is omitted.

    >>> argument_at((), {"src": 2}, 1, "src", "other")
    2
    """
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)
