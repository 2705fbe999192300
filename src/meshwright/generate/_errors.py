"""The errors of generation.

MeshwrightError
└── GenerationError   prompts or options with which tokens cannot be generated
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class GenerationError(MeshwrightError, ValueError):
    """Prompts or options with which tokens cannot be generated."""
