"""Autograd history of a view that has its own memory.

On one device, a write to the base gives its views the history of the write at once. A DistView gets that history when
it is read again. `requires_grad` checks the base instead, as torch does, which takes no communication. The other
attributes concern nodes of the graph, which exist only after the view was read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

from torch import Tensor

from meshwright.layout import TorchValue

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.dist_tensor import DistTensor, wants_grad
from ..core.handler_registry import handles
from ..torch_hooks import interception_on, no_interception
from .dist_view import DistView, has_lost_history, is_behind, may_require_grad
from .lost_history import lost_history_error


def _gains_history(view: DistView) -> bool:
    """True if reading the view again gives it a gradient, because of a write to its base; without communication."""
    source = view._outer._source
    if not (source.tracked and may_require_grad(view)):
        return False
    base = source.base
    if isinstance(base, DistView) and _gains_history(base):
        return True
    with no_interception():
        return wants_grad(base) and is_behind(view._outer)


def _requires_grad(own: Callable[[TorchValue], TorchValue], view: DistView) -> bool:
    """True also if the base requires grad, even if the view was made before the base did, or under `torch.no_grad`."""
    if own(view):
        return True
    return interception_on() and may_require_grad(view) and _requires_grad_itself(_first_base(view))


def _first_base(x: DistTensor) -> DistTensor:
    """Return the tensor at the base of a chain of views, which torch checks; it checks no view in between."""
    while True:
        if isinstance(x, DistView):
            if not may_require_grad(x):
                return x
            x = x._outer._source.base
            continue
        with no_interception():
            base = x._base
        if not isinstance(base, DistTensor):
            return x
        x = base


def _requires_grad_itself(x: DistTensor) -> bool:
    with no_interception():
        return wants_grad(x)


def _attribute_of_graph(own: Callable[[TorchValue], TorchValue], view: DistView) -> TorchValue:
    """Return an attribute of the graph, after the view was read again if that gives it another place there."""
    if interception_on() and _gains_history(view):
        view._read_again()
    return own(view)


def _history(own: Callable[[TorchValue], TorchValue], view: DistView) -> TorchValue:
    """Return an attribute of the history. Raises OperationError for a view that has lost its history."""
    if interception_on() and has_lost_history(view):
        raise lost_history_error(view._spec)
    return _attribute_of_graph(own, view)


_ATTRIBUTES: dict[str, Callable[[Callable[[TorchValue], TorchValue], DistView], TorchValue]] = {
    "requires_grad": _requires_grad,
    "is_leaf": _history,
    "grad_fn": _history,
    "output_nr": _attribute_of_graph,
}
"""Attribute → `answer(own, view)`, where `own` answers for a tensor that is no view."""


@handles(*[getattr(Tensor, name).__get__ for name in _ATTRIBUTES], numbers=False)
def _attribute_of_view(func: TorchValue, types: Sequence[type], args: Arguments, kwargs: NamedArguments) -> TorchValue:
    return getattr(args[0], func.__self__.__name__)


_CHANGING_METHODS = ("requires_grad_", "retain_grad")
"""Methods that change autograd's treatment of a tensor; they need the history that the view has on one device."""


def answer_for_views() -> None:
    """Give views their own attributes about history; call it after DistTensor has got its answers."""
    for name, answer in _ATTRIBUTES.items():
        setattr(DistView, name, _property_with(getattr(DistTensor, name), answer))
    for name in _CHANGING_METHODS:
        setattr(DistView, name, _with_history(getattr(DistTensor, name)))


def _property_with(
    own: TorchValue, answer: Callable[[Callable[[TorchValue], TorchValue], DistView], TorchValue]
) -> property:
    return property(lambda view: answer(own.__get__, view), _with_history(own.__set__))


def _with_history(own: TorchFunction) -> TorchFunction:
    """Return the method with a first step that reads a view again if it gains a history."""

    @wraps(own)
    def method(view: DistView, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        return _attribute_of_graph(lambda x: own(x, *args, **kwargs), view)

    return method
