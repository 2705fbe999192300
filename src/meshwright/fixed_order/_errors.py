"""The errors of fixed orders of summation.

MeshwrightError
└── SameNumbersError   a call whose numbers would depend on the mesh or on the batch
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class SameNumbersError(MeshwrightError, RuntimeError):
    """A call inside `same_numbers` whose numbers would depend on the mesh or on the batch."""


def refusal(asked: str, why: str) -> SameNumbersError:
    """Return the error for a call that is refused."""
    return SameNumbersError(
        f"{asked} inside same_numbers()",
        "a call whose result may depend on the mesh, on the batch or on the phase",
        why,
        "call it outside the block, or write it with matmul, sum, mean, softmax and elementwise functions",
    )
