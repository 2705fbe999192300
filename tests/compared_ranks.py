"""Comparison of the calls of simulated ranks as between processes: they must be for the same values.

Simulated ranks compare only the form of their calls, so a comparison that is wrong would be seen in processes alone.
Ranks that share a capture run other code than processes, so a few right programs raise errors here.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from meshwright.comm import call_purpose
from meshwright.comm._errors import disagreement_error
from meshwright.comm.communicators import call_purpose as purposes
from meshwright.comm.communicators.call import CommCall
from meshwright.comm.simulation import simulated_ranks
from meshwright.tensor.core.computation_numbers import follow

_check_form = simulated_ranks._World._check_agreement


def _check_values(
    self: simulated_ranks._World, meeting: simulated_ranks._PendingCollective, rank: int, call: CommCall
) -> None:
    """Raise DisagreementError if a rank makes the call for other values than the ranks before it."""
    _check_form(self, meeting, rank, call)
    seen: dict[int, tuple[int, str]] = vars(meeting).setdefault("purposes", {})
    number, name = call_purpose.what
    for peer, (other, other_name) in seen.items():
        if other != number:
            mine, theirs = f"{call} for {name}{self._line_of(rank)}", f"{call} for {other_name}{self._line_of(peer)}"
            raise disagreement_error(rank, mine, peer, theirs, "the calls are for different values")
    seen[rank] = call_purpose.what


@contextmanager
def compared() -> Generator[None]:
    """Compare the calls of simulated ranks, and check their steps, as between processes."""
    simulated_ranks._World._check_agreement = _check_values
    purposes.calls_are_compared()
    try:
        yield
    finally:
        simulated_ranks._World._check_agreement = _check_form
        purposes._Compared.here = False
        follow(False)
