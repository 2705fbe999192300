"""Check that a step of an optimizer with code of the user changes tensors alone.

Such a step is recorded once. A counter, a learning rate or a list that the step or a hook changes in Python would
change in the recording and in no later step. So all such changes are found after the recording, undone, and refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ._errors import CaptureError
from .guards import OPTIMIZER, Guards, side_effect

ASKED = "to record the optimizer's step"


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Raise CaptureError for an optimizer that holds another one, which would step with states of its own."""
    name = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
    if name is not None:
        raise CaptureError(
            ASKED, f"an optimizer inside an optimizer: {type(optimizer).__name__}.{name}",
            "the inner one keeps states that no program writes",
            "pass the inner optimizer, or make a subclass of it",
        )  # fmt: skip


@contextmanager
def refusing_effects(optimizer: Optimizer, twin: Optimizer) -> Generator[None]:
    """Raise SideEffectError if the twin's step, made inside the context, changes anything but tensors."""
    guards, before = Guards.of({"optimizer": optimizer}), dict(_own(twin))
    try:
        yield
    except BaseException:
        guards.restore()
        raise
    changed = next(guards.changes(), None) or next(_changes(before, dict(_own(twin))), None)
    guards.restore()
    if changed is not None:
        raise side_effect(
            ASKED, *changed, "keep it in a tensor of the state, self.state[p][...], or change it outside of the step"
        )


def _own(twin: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and options of the twin, which are apart from those of the optimizer."""
    yield from ((name, value) for name, value in vars(twin).items() if name not in OPTIMIZER)
    for at, group in enumerate(twin.param_groups):
        yield from ((f"param_groups[{at}][{key!r}]", value) for key, value in group.items() if key != "params")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one is not other:
            yield f"optimizer.{name}", one, other
