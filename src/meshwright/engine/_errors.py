"""What can be wrong at the door.

MeshwrightError
├── LocalMapError       a function of local parts, and what it was said to take or give, do not fit
├── ExpertsError        tokens, what was routed, and a function of experts, do not fit
├── BatchError          a batch of data, and the meshes it is to be laid over, do not fit
├── TrainingError       a training run that cannot be as it was asked for
├── DifferenceError     a model on a mesh does not give the numbers of one device
├── NonFiniteGradientError   gradients of which no update can be made
├── MaterializeError    a tensor on the meta device that nothing gives values to
├── SharedMemoryError   tensors of a model share memory, but their parts on a mesh cannot
└── TorchDTensorError   a layout that torch's DTensor cannot say, or no torch.distributed to say it to
"""

from __future__ import annotations

from meshwright.layout import MeshwrightError


class LocalMapError(MeshwrightError, ValueError):
    """A function of local parts, and what it was said to take or give, do not fit."""


class ExpertsError(MeshwrightError, ValueError):
    """Tokens, what was routed, and a function of experts do not fit."""


class BatchError(MeshwrightError, ValueError):
    """A batch of data, and the meshes that it is to be laid over, do not fit."""


class TorchDTensorError(MeshwrightError, ValueError):
    """A layout that torch's DTensor cannot say, or no torch.distributed to say it to."""


class TrainingError(MeshwrightError, ValueError):
    """A training run that cannot be as it was asked for."""


class DifferenceError(MeshwrightError, AssertionError):
    """A model on a mesh does not give the numbers of one device."""


class NonFiniteGradientError(MeshwrightError, ArithmeticError):
    """Gradients with numbers that are infinite or none: no update can be made of them."""


class ReplicaError(MeshwrightError, RuntimeError):
    """Ranks that should hold the same numbers hold others."""


class MaterializeError(MeshwrightError, ValueError):
    """A tensor on the meta device that nothing gives values to."""


class SharedMemoryError(MeshwrightError, RuntimeError):
    """Tensors of a model share memory, but their parts on a mesh cannot."""


class StaticError(MeshwrightError):
    """A call of a static model that cannot be."""


class StrategyError(MeshwrightError, ValueError):
    """An option that is not known, has no such value, or does not go together with another."""
