"""Settings of the comparison of calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .._errors import CallError


@dataclass(frozen=True, slots=True)
class Check:
    """Settings of the comparison of calls: every `every`-th call of a group (0: none), and the time limits.

    After `limit` seconds a deadlock or a stopped process is an error. After four limits a slow rank causes a warning,
    and after `patience` seconds an error.

    >>> Check.parse("100")
    Check(every=100, limit=20.0, patience=1800.0)
    """

    every: int = 1
    limit: float = 20.0
    patience: float = 1800.0

    @staticmethod
    def parse(text: str | int, limit: float = 20.0, patience: float = 1800.0) -> Check:
        """Return the check for "every", "off", or a number N (every N-th call).

        Raises:
            CallError: the text is none of these.
        """
        words = {"every": 1, "off": 0}
        every = words.get(str(text))
        if every is None and str(text).isdecimal():
            every = int(text)
        if every is None:
            raise CallError(
                f"check={text!r}",
                "an unknown check",
                "the check is the interval between compared calls: every call, none, or every N-th call",
                'use "every", "off" or a number',
            )
        return Check(every, limit, patience)

    @staticmethod
    def from_environment(env: Mapping[str, str] | None = None) -> Check:
        """Return the check that MESHWRIGHT_CHECK, MESHWRIGHT_LIMIT and MESHWRIGHT_PATIENCE describe."""
        env = os.environ if env is None else env
        limit, patience = float(env.get("MESHWRIGHT_LIMIT", "20")), float(env.get("MESHWRIGHT_PATIENCE", "1800"))
        return Check.parse(env.get("MESHWRIGHT_CHECK", "every"), limit, patience)
