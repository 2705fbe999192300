"""The one way in which a conversion can be refused."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class ReshardError(MeshwrightError, ValueError):
    """A conversion between two specs that are not the same tensor, or a local part that is not what the spec says."""
