"""Redirection of the model's parameters to fake parameters during the recording of an optimizer's step.

Hooks of an optimizer use the real parameters: `clip_grad_norm_(model.parameters(), 1)`, or a list created before. Their
operations must reach the fake parameters and gradients. So each real parameter temporarily has a class whose operators
and attributes are those of its fake parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.layout import TorchValue
from meshwright.tensor import map_tensors

_FAKE = "_meshwright_fake"


class _StandIn:
    """Mixin for the temporary class of a parameter; it redirects each use to the fake parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: TorchValue = (), kwargs: TorchValue = None
    ) -> TorchValue:
        args, kwargs = map_tensors(_fake_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def grad(self) -> Tensor | None:
        return _fake_of(self).grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _fake_of(self).grad = value


class _Replaced(TorchFunctionMode):
    """Mode that replaces parameters among the arguments; without it, a fake gradient before them handles the call."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: TorchValue = (), kwargs: TorchValue = None
    ) -> TorchValue:
        if any(issubclass(kind, _StandIn) for kind in types):
            args, kwargs = map_tensors(_fake_of, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fake_of(x: TorchValue) -> TorchValue:
    return getattr(x, "__dict__", {}).get(_FAKE, x)


@lru_cache(maxsize=256)
def _redirecting_class(kind: type[Tensor]) -> type[Tensor]:
    return type(kind.__name__, (_StandIn, kind), {})


@contextmanager
def redirect_parameters(pairs: Iterable[tuple[Tensor, Tensor]]) -> Generator[None]:
    """Redirect each use of the first tensor of a pair to the second tensor inside the context."""
    given: list[tuple[Tensor, type[Tensor]]] = []
    try:
        for real, fake in pairs:
            given.append((real, type(real)))
            setattr(real, _FAKE, fake)
            real.__class__ = _redirecting_class(type(real))
        with _Replaced():
            yield
    finally:
        for real, kind in given:
            real.__class__ = kind
            delattr(real, _FAKE)
