"""Check that a step of an optimizer with user code changes only tensors.

Such a step is recorded once. A counter, a learning rate or a list that the step or a hook changes in Python would
change in the recording and in no later step. So such changes are detected after the recording, undone, and refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch.optim import Optimizer

from .._errors import CaptureError
from ..guards import OPTIMIZER, Guards, side_effect

ASKED = "recording the optimizer's step"
_PLAIN = {int, float, bool, str}


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Raise CaptureError for an optimizer that wraps another one, which would use states of its own."""
    name = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
    if name is not None:
        raise CaptureError(
            ASKED,
            f"an optimizer inside an optimizer: {type(optimizer).__name__}.{name}",
            "the inner optimizer keeps states that no program writes",
            "pass the inner optimizer, or make a subclass of it",
        )


@contextmanager
def forbid_side_effects(optimizer: Optimizer, twin: Optimizer) -> Generator[None]:
    """Raise SideEffectError if the twin's step, run inside the context, changes anything but tensors."""
    guards, groups = Guards.of({"optimizer": optimizer}), [dict(group) for group in optimizer.param_groups]
    before = [dict(_separate_attributes(x)) for x in (optimizer, twin)]
    try:
        yield
        after = [dict(_separate_attributes(x)) for x in (optimizer, twin)]
        changed = next(guards.changes(), None) or next(chain(*map(_changes, before, after)), None)
    finally:
        guards.restore()
        for group, held in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(held)
    if changed is not None:
        raise side_effect(
            ASKED,
            *changed,
            "keep the value in a tensor of the state, self.state[p][...], or change it outside of the step",
        )


def _separate_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and group options that the twin and the optimizer have separately."""
    yield from ((name, value) for name, value in vars(optimizer).items() if name not in OPTIMIZER)
    for at, group in enumerate(optimizer.param_groups):
        yield from ((f"param_groups[{at}][{key!r}]", value) for key, value in group.items() if key != "params")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        is_equal = type(one) is type(other) and type(one) in _PLAIN and one == other
        if one is not other and not is_equal:
            yield f"optimizer.{name}", one, other
