"""The errors of the engine's public functions.

MeshwrightError
├── LocalMapError            a function of local parts does not fit the given placements
├── ExpertsError             tokens, indices, weights, or the function of experts do not fit together
├── BatchError               a batch of data does not fit the meshes
├── TrainingError            a training run that is not possible with the given arguments
├── DifferenceError          a model on a mesh gives other numbers than one device
├── NonFiniteGradientError   gradients with infinite or NaN elements
├── ReplicaError             ranks that should hold equal numbers hold different ones
├── MaterializeError         a tensor on the meta device that no initialiser gives values to
├── SharedMemoryError        tensors of a model share memory, but their parts on a mesh cannot
├── StaticError              a call of a static model that is not possible
├── StrategyError            an option that is unknown, invalid, or in conflict with another one
└── TorchDTensorError        a layout that torch's DTensor cannot express, or torch.distributed is missing
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class LocalMapError(MeshwrightError, ValueError):
    """A function of local parts does not fit the placements that were given for its operands or results."""


class ExpertsError(MeshwrightError, ValueError):
    """Tokens, indices, weights, or the function of experts do not fit together."""


class BatchError(MeshwrightError, ValueError):
    """A batch of data does not fit the meshes over which it is to be distributed."""


class TorchDTensorError(MeshwrightError, ValueError):
    """A layout that torch's DTensor cannot express, or torch.distributed is missing."""


class TrainingError(MeshwrightError, ValueError):
    """A training run that is not possible with the given arguments."""


class DifferenceError(MeshwrightError, AssertionError):
    """A model on a mesh gives other numbers than one device."""


class NonFiniteGradientError(MeshwrightError, ArithmeticError):
    """Gradients with infinite or NaN elements, of which no update can be made."""


class ReplicaError(MeshwrightError, RuntimeError):
    """Ranks that should hold equal numbers hold different ones."""


class MaterializeError(MeshwrightError, ValueError):
    """A tensor on the meta device that no initialiser gives values to."""


class SharedMemoryError(MeshwrightError, RuntimeError):
    """Tensors of a model share memory, but their parts on a mesh cannot."""


class StaticError(MeshwrightError):
    """A call of a static model that is not possible."""


class StrategyError(MeshwrightError, ValueError):
    """An option that is unknown, has an invalid value, or conflicts with another option."""
