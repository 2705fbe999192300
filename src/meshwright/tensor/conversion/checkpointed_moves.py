"""Values that came from another pipeline stage inside `torch.utils.checkpoint`, kept for its second run.

A checkpointed call runs again in the backward pass of each rank that saves a tensor in it. Ranks of other stages save
none, or run it again at another time. So a value that was sent from stage to stage cannot be sent again. Each rank
keeps what it got, as the inputs of a checkpointed call are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

from ..torch_hooks import no_interception
from .torch_hooks import checkpointed_call


@dataclass(slots=True)
class _Kept:
    """The values that a call got, in order, and how many of them each of its later runs has taken."""

    values: list[Tensor] = field(default_factory=list[Tensor])
    taken: Counter[object] = field(default_factory=Counter[object])


_kept: WeakKeyDictionary[object, _Kept] = WeakKeyDictionary()
"""The checkpointed calls whose graphs exist → what they got."""


def across_stages(send: Callable[[], Tensor]) -> Tensor:
    """Return `send()`, a local part that comes from another mesh; in a second run of the call, what the first one got.

    Each part is copied, because the call may write to it.
    """
    found = checkpointed_call()
    if found is None:
        return send()
    call, again = found
    kept = _kept.setdefault(call, _Kept())
    if again is None:
        out = send()
        kept.values.append(out.detach().clone())
        return out
    at = kept.taken[again]
    kept.taken[again] += 1
    return kept.values[at].clone() if at < len(kept.values) else send()


def note_arrival(x: Tensor) -> None:
    """Note that the running checkpointed call reads `x`, which was sent before and is not sent again now."""
    if checkpointed_call() is not None:
        with no_interception():
            across_stages(lambda: x)
