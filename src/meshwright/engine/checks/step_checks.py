"""The checks before an update, and how often each is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .._errors import StrategyError

BadNumbers = Literal["stop", "skip", "off"]


@dataclass(frozen=True, slots=True)
class StepChecks:
    """The checks before each update, on ranks that are processes and compare their calls.

    bad_numbers: gradients with numbers that are not finite "stop" all ranks, or all of them "skip" the update.
    replicas: number of steps from one comparison of replicas to the next. None gives one that costs at most 0.5 % of
        a step; 0 means never. The first one is before the first update.
    replay: number of static steps from one that runs twice to the next; 0 means never.
    """

    bad_numbers: BadNumbers = "stop"
    replicas: int | None = None
    replay: int = 0


class _Chosen:
    checks = StepChecks()


def check_steps(bad_numbers: BadNumbers = "stop", replicas: int | None = None, replay: int = 0) -> None:
    """Choose the checks before updates, for this process; every rank makes the same call. See `StepChecks`.

    Raises:
        StrategyError: there is no such check, or a number of steps is negative.
    """
    if bad_numbers not in get_args(BadNumbers) or (replicas or 0) < 0 or replay < 0:
        raise StrategyError(
            f"check_steps({bad_numbers!r}, replicas={replicas}, replay={replay})",
            "no such check",
            "bad_numbers is 'stop', 'skip' or 'off'; replicas and replay are numbers of steps, not negative",
            'call check_steps("stop"), check_steps("skip") or check_steps("off"), with replicas=N and replay=N',
        )
    _Chosen.checks = StepChecks(bad_numbers, replicas, replay)


def current_checks() -> StepChecks:
    """Return the checks of this process."""
    return _Chosen.checks
