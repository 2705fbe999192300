"""Errors about rules and their calls."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class RuleError(MeshwrightError, ValueError):
    """Error for a rule that cannot be read, or for shapes that do not fit a rule."""
