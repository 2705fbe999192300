"""All architectures of the matrix, by their names in the table."""

from __future__ import annotations

from benchmarks import _matrix_experts, _matrix_signals, _matrix_text, _matrix_vision
from benchmarks._matrix_subject import Subject

MODELS: dict[str, Subject] = {
    **_matrix_text.MODELS,
    **_matrix_experts.MODELS,
    **_matrix_vision.MODELS,
    **_matrix_signals.MODELS,
}
"""Name in the table → architecture."""
