"""The errors of fixed orders of summation.

MeshwrightError
└── SameNumbersError   a call whose numbers would depend on the mesh or on the batch
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SameNumbersError(MeshwrightError, RuntimeError):
    """A call inside `same_numbers` whose numbers would depend on the mesh or on the batch."""
