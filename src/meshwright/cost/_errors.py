"""What can be wrong with a price."""

from meshwright.layout import MeshwrightError


class CostError(MeshwrightError, ValueError):
    """A device, link or cluster that nobody knows, or that cannot be."""
