"""Error about conversions."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class ReshardError(MeshwrightError, ValueError):
    """Error for a conversion between specs of different tensors, or for a local tensor that does not match its spec."""
