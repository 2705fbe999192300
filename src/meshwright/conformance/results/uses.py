"""The uses of a machine, from the results of its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .result import NOT_RUN, OK, Result

PROCESSES, FOUR_PROCESSES = "two processes", "four processes"
SIMULATED = "simulated"
RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a machine, the answer "yes", "no" or "unknown", and the reason."""

    use: str
    answer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.answer:<8} {self.use}{f': {self.reason}' if self.reason else ''}"


Choice = Callable[[Result], bool]

_USES: tuple[tuple[str, Choice], ...] = (
    ("tensors on one device", lambda r: r.level == 0),
    ("all operators that have rules", lambda r: r.level == 1),
    ("simulated ranks", lambda r: r.level == 2),
    ("communication between processes", lambda r: r.level == 3),
    ("training on simulated ranks", lambda r: r.level == 4 and SIMULATED in r.name),
    ("training on several processes", lambda r: r.level == 4 and "processes" in r.name),
    ("checkpoints and exact resumption", lambda r: r.level == 4 and RESUME in r.name),
)
"""Each use, and the checks that it needs."""


def uses_of(results: Sequence[Result]) -> tuple[Use, ...]:
    """Return the uses of the machine; the answer is "unknown" if no check of a use was run."""
    return tuple(_use(name, [each for each in results if needs(each)]) for name, needs in _USES)


def _use(name: str, needed: Sequence[Result]) -> Use:
    failed = [each for each in needed if each.failed]
    ok = sum(each.state == OK for each in needed)
    reasons = {each.detail for each in needed if each.state == NOT_RUN}
    if failed:
        names = ", ".join(each.name for each in failed[:5])
        more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
        return Use(name, "no", f"{len(failed)} of {len(needed)} checks failed: {names}{more}")
    if not ok:
        return Use(name, "unknown", "; ".join(sorted(reasons)) or "no check was run")
    return Use(name, "yes", f"{ok} checks")
