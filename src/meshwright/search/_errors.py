"""What can be wrong with a search."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SearchError(MeshwrightError, ValueError):
    """A search that has no solution or cannot be carried out, or a plan that is none."""
