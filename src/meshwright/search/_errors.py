"""Errors of the search."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SearchError(MeshwrightError, ValueError):
    """A search that has no solution or cannot run, or a plan that is not valid."""


MOST = 2**31 - 1
"""Upper bound on every size of a plan or a model, so that the product of two sizes fits into 64 bits."""


def check_sizes(asked: str, **sizes: int) -> None:
    """Raise SearchError if a size is larger than `MOST`."""
    if large := [f"{name} = {size}" for name, size in sizes.items() if size > MOST]:
        raise SearchError(
            asked, ", ".join(large), f"sizes are at most {MOST}", "write " + large[0].split()[0] + " = 4096"
        )
