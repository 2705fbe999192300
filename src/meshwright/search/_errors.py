"""What can be wrong with a search."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SearchError(MeshwrightError, ValueError):
    """A search that has no solution or cannot be carried out, or a plan that is none."""


MOST = 2**31 - 1
"""Of any size that a plan or a model has: products of two of them are numbers that a machine has."""


def check_sizes(asked: str, **sizes: int) -> None:
    """Raises SearchError for a size that nothing has."""
    if large := [f"{name} = {size}" for name, size in sizes.items() if size > MOST]:
        raise SearchError(asked, ", ".join(large), f"sizes are at most {MOST}", large[0].split()[0] + " = 4096")
