"""What can be wrong with a rule, or with a call of it."""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class RuleError(MeshwrightError, ValueError):
    """A rule that cannot be read, or shapes that do not fit it."""
