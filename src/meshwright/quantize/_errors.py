"""The errors of quantization.

MeshwrightError
└── QuantizeError           a scheme, a layer or a model that cannot be quantized
    └── CalibrationError    calibration data that is missing, too small, or not finite; finished stages of others
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class QuantizeError(MeshwrightError, ValueError):
    """A scheme, a layer or a model that cannot be quantized."""


class CalibrationError(QuantizeError):
    """Calibration data that is missing, too small, or not finite, or finished stages that cannot be used."""
