"""Actions of a pipeline schedule, and their text form.

F3.1     forward of microbatch 3 through chunk 1
B3.1     its backward for the gradients of inputs, W3.1 for the gradients of weights, BW3.1 for both
R3.1     its forward again, for a backward that kept only the inputs
>F3.1    send the output of F3.1 to the next chunk, <F3.1 receive it
>B3.1    send the input gradient of B3.1 to the chunk before, <B3.1 receive it
>F3.1:4  the same for a later chunk (a skip connection)
G.1      gather the parameters of chunk 1, S.1 reduce and scatter their gradients
O        the optimizer's update; O3: with the gradients up to microbatch 3, while others are in flight
F4.0&B1.3  two actions side by side: they end when both have ended
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from .._errors import ScheduleError


class ActionKind(StrEnum):
    """Kind of an action; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "BW"
    BACKWARD_INPUT = "B"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    SEND_FORWARD = ">F"
    RECEIVE_FORWARD = "<F"
    SEND_BACKWARD = ">B"
    RECEIVE_BACKWARD = "<B"
    GATHER = "G"
    SCATTER = "S"
    OPTIMIZER = "O"


SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})
TRANSFERS = SENDS | RECEIVES
COMPUTES = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
        ActionKind.RECOMPUTE,
    }
)
NOTHING = -1
"""Microbatch of an action that concerns all microbatches, and chunk of an action that concerns the whole rank."""


class Action(NamedTuple):
    """One action of a rank.

    `to` is the chunk at the other end of a message, if that is not a neighbouring chunk. `beside` is an action that
    runs at the same time.
    """

    kind: ActionKind
    microbatch: int = NOTHING
    chunk: int = NOTHING
    to: int = NOTHING
    beside: Action | None = None

    @property
    def atoms(self) -> Iterator[Action]:
        """The actions that run at the same time as this one, itself included, each with `beside=None`."""
        action: Action | None = self
        while action is not None:
            yield action._replace(beside=None)
            action = action.beside

    @property
    def other_end(self) -> int:
        """The chunk at the other end of a message."""
        if self.to != NOTHING:
            return self.to
        return self.chunk + (1 if self.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD) else -1)

    def __str__(self) -> str:
        return "&".join(map(_text, self.atoms))


_FORM = re.compile(r"(BW|[<>]?[FB]|[WRGSO])(\d{1,9})?(?:\.(\d{1,9}))?(?::(\d{1,9}))?")
MOST_BESIDE = 16
"""Upper bound on the actions that one action in text form joins by `&`."""
_NEEDS_MICROBATCH = COMPUTES | TRANSFERS


def _text(action: Action) -> str:
    microbatch = "" if action.microbatch == NOTHING else action.microbatch
    chunk = "" if action.chunk == NOTHING else f".{action.chunk}"
    return f"{action.kind}{microbatch}{chunk}" + ("" if action.to == NOTHING else f":{action.to}")


def parse_action(text: str) -> Action:
    """Return the action that `text` describes; the inverse of `str`. Raises ScheduleError for any other text.

    >>> parse_action("F4.0&B1.3").beside.chunk
    3
    """
    action: Action | None = None
    if text.count("&") >= MOST_BESIDE:
        raise ScheduleError(
            f"an action {text[:40]!r}",
            f"{text.count('&') + 1} actions",
            f"at most {MOST_BESIDE} actions run together",
            "write F0.1&B0.1",
        )
    for part in reversed(text.split("&")):
        action = _parsed(part)._replace(beside=action)
    assert action is not None
    return action


def _parsed(text: str) -> Action:
    found = _FORM.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"an action {text!r}",
            "no such action",
            "a table consists of actions in this notation",
            "write F0.1, BW0.1, B0.1, W0.1, R0.1, >F0.1, <F0.1, >B0.1, <B0.1, G.1, S.1 or O",
        )
    kind = ActionKind(found[1])
    microbatch, chunk, to = (NOTHING if n is None else int(n) for n in found.groups()[1:])
    if kind in _NEEDS_MICROBATCH and microbatch == NOTHING:
        raise ScheduleError(
            f"an action {text!r}", "no microbatch", f"{kind} needs a microbatch", f"write {kind}0{text[len(kind) :]}"
        )
    return Action(kind, microbatch, chunk, to)
