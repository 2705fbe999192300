"""The errors of weights that two models share.

MeshwrightError
└── WeightError             weights that cannot be moved from one model to another
    └── StaleWeightsError   tokens of weights that are older than the trainer's
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class WeightError(MeshwrightError, ValueError):
    """Weights that cannot be moved from one model to another."""


class StaleWeightsError(WeightError):
    """Tokens of weights that are older than those of the trainer."""
