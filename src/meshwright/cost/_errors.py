"""Errors of the cost model."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from meshwright.layout import MeshwrightError

T = TypeVar("T")


class CostError(MeshwrightError, ValueError):
    """A device, link or cluster that is unknown or impossible."""


def known_by(name: str, table: Mapping[str, T], what: str, write: str) -> T:
    """Return the entry of `table` with this name.

    Raises:
        CostError: the name is unknown. The message suggests the closest name, or `write`, the call that makes a new
            `what`.
    """
    found = table.get(name)
    if found is None:
        plain = {known.casefold(): known for known in table}
        near = get_close_matches(name.casefold(), plain, n=1)
        raise CostError(
            f"the {what} {name!r}",
            f"no such {what} in the table",
            f"the known names are {', '.join(table)}",
            f"write {plain[near[0]]}, or {write} with your own rates" if near else f"write {write} with your own rates",
        )
    return found
