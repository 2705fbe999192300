"""Names of functions that users know."""

from __future__ import annotations


def name_of(func: object) -> str:
    """Return the name by which a user knows `func`; it is the same in all processes."""
    names = (getattr(func, "__name__", None), getattr(func, "name", None))  # a function of TorchScript has the second
    name = next((x for x in names if isinstance(x, str) and x), type(func).__name__)
    if name in ("__get__", "__set__"):
        held = getattr(func, "__self__", None)
        held = getattr(getattr(held, "fget", None), "__self__", held)  # torch's own attribute behind a property
        return str(getattr(held, "__name__", name))
    return str(name)
