"""Tickets: conversions that are queued on a communication stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import communication_streams


class Ticket:
    """A conversion that is queued on a communication stream, and its event `done`.

    `owner` is the stream that was current at the start. It has allocated the operands and the results, which the ticket
    holds until the owner waits for the event. `finish` makes the local tensor from the results.
    """

    def __init__(
        self,
        done: torch.Event,
        owner: torch.Stream,
        held: Sequence[Tensor],
        finish: Callable[[], Tensor],
        where: str,
    ) -> None:
        self._done = done
        self._owner = owner
        self._held: Sequence[Tensor] | None = held
        self._finish: Callable[[], Tensor] | None = finish
        self._where = where
        self._part: Tensor | None = None

    def wait(self) -> Tensor:
        """Make the current stream wait, and return this rank's part; the host goes on."""
        finish, held = self._finish, self._held
        if finish is None or held is None:
            assert self._part is not None
            return self._part
        here = torch.accelerator.current_stream(self._owner.device)
        if here == self._owner:
            communication_streams.wait(here, self._done, f"results of {self._where}")
        else:
            communication_streams.wait(here, self._done, f"results of {self._where} on another stream")
            for x in held:
                x.record_stream(here)  # the owner waits neither for this stream nor for the event
        self._held = self._finish = None
        self._part = finish()
        return self._part

    def __del__(self) -> None:
        """Make the owner wait, because the operands and the results go back to it."""
        if self._held is not None and not sys.is_finalizing():
            communication_streams.wait(self._owner, self._done, f"memory of {self._where}")
