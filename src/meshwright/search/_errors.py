"""Errors of the search."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SearchError(MeshwrightError, ValueError):
    """A search that has no solution or cannot run, or a plan that is not valid."""


MOST = 2**31 - 1
"""Upper bound on every size of a plan or a model, so that the product of two sizes fits into 64 bits."""


def check_sizes(asked: str, least: int = 0, **sizes: int) -> None:
    """Raise SearchError if a size is smaller than `least` or larger than `MOST`."""
    if wrong := {name: size for name, size in sizes.items() if not least <= size <= MOST}:
        raise SearchError(
            asked,
            ", ".join(f"{name} = {size}" for name, size in wrong.items()),
            f"sizes are at most {MOST}, and at least {least}",
            f"write {next(iter(wrong))} = 4096",
        )
