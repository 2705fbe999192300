"""What can be wrong with a search."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SearchError(MeshwrightError, ValueError):
    """A search that has no solution, or that cannot be carried out."""
