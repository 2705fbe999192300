"""The errors of generation.

MeshwrightError
└── GenerationError   prompts or options with which tokens cannot be generated

UserWarning
└── EagerStepWarning   a decode step that is not a program
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class GenerationError(MeshwrightError, ValueError):
    """Prompts or options with which tokens cannot be generated."""


class EagerStepWarning(UserWarning):
    """A decode step runs eagerly: it is correct, but slower than a program. Told once for each sampler."""
