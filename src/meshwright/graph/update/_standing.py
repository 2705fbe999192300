"""While an optimizer's step is recorded, the model's parameters stand for the fake ones that the recording works on.

Hooks of an optimizer use the parameters that they know: `clip_grad_norm_(model.parameters(), 1)`, or a list that was
made before. What they do must reach the fake parameters and gradients. So each parameter has, for that time, a class
whose operators and attributes are those of its fake parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.tensor import map_tensors

_FAKE = "_meshwright_fake"


class _StandIn:
    """What the class of a parameter has in addition, so that each use is one of the fake parameter."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors(_fake_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def grad(self) -> Tensor | None:
        return _fake_of(self).grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _fake_of(self).grad = value


class _Replaced(TorchFunctionMode):
    """A mode that replaces parameters among arguments: otherwise a fake gradient before them handles the call."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, _StandIn) for kind in types):
            args, kwargs = map_tensors(_fake_of, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fake_of(x: Any) -> Any:
    return getattr(x, "__dict__", {}).get(_FAKE, x)


@lru_cache(maxsize=256)
def _standing(kind: type[Tensor]) -> type[Tensor]:
    return type(kind.__name__, (_StandIn, kind), {})


@contextmanager
def standing_for(pairs: Iterable[tuple[Tensor, Tensor]]) -> Generator[None]:
    """Inside, each use of the first tensor of a pair is a use of the second one."""
    given: list[tuple[Tensor, type[Tensor]]] = []
    try:
        for real, fake in pairs:
            given.append((real, type(real)))
            setattr(real, _FAKE, fake)
            real.__class__ = _standing(type(real))
        with _Replaced():
            yield
    finally:
        for real, kind in given:
            real.__class__ = kind
            delattr(real, _FAKE)
