"""All error classes, by name: `mw.errors.PickleError`, or `mw.PickleError`. docs/troubleshooting.md explains each."""

from __future__ import annotations

from meshwright.checkpoint import (
    CheckpointError,
    CheckpointFileError,
    CheckpointWarning,
    FolderInUseError,
    NewerFormatError,
    ReadTimeoutError,
    WriteTimeoutError,
)
from meshwright.comm import (
    CallError,
    CommError,
    DeadlockError,
    DeadPeerError,
    DisagreementError,
    LaunchError,
    MissingCallError,
    NestedSimulationError,
    NoAnswerError,
    NoCommunicatorError,
    StragglerWarning,
)
from meshwright.cost import CostError
from meshwright.engine import (
    BatchError,
    DifferenceError,
    ExpertsError,
    LocalMapError,
    MaterializeError,
    NonFiniteGradientError,
    ReplicaError,
    SharedMemoryError,
    StaticError,
    StrategyError,
    TorchDTensorError,
    TrainingError,
)
from meshwright.fixed_order import SameNumbersError
from meshwright.generate import EagerStepWarning, GenerationError
from meshwright.graph import (
    CaptureError,
    HiddenTensorError,
    ProgramError,
    ProgramFileError,
    RewriteError,
    SideEffectError,
)
from meshwright.layout import InputError, LayoutError, MeshError, MeshwrightError, PlacementError, PlatformError
from meshwright.models import ModelError
from meshwright.pipeline import ScheduleError, StageError
from meshwright.quantize import CalibrationError, QuantizeError
from meshwright.report import ShowError
from meshwright.reshard import ReshardError
from meshwright.search import SearchError
from meshwright.spmd import RuleError
from meshwright.tensor import (
    AbsentError,
    CollectiveError,
    CompileError,
    LocalShapeError,
    MemoryAccessError,
    MixedMeshError,
    OperationError,
    PickleError,
    PlainInBackwardError,
    RandomSourceError,
    RanWholeWarning,
    SimulatedRankError,
    TraceError,
)
from meshwright.weights import StaleWeightsError, WeightError

__all__ = [
    "AbsentError",
    "BatchError",
    "CalibrationError",
    "CallError",
    "CaptureError",
    "CheckpointError",
    "CheckpointFileError",
    "CheckpointWarning",
    "CollectiveError",
    "CommError",
    "CompileError",
    "CostError",
    "DeadPeerError",
    "DeadlockError",
    "DifferenceError",
    "DisagreementError",
    "EagerStepWarning",
    "ExpertsError",
    "FolderInUseError",
    "GenerationError",
    "HiddenTensorError",
    "InputError",
    "LaunchError",
    "LayoutError",
    "LocalMapError",
    "LocalShapeError",
    "MaterializeError",
    "MemoryAccessError",
    "MeshError",
    "MeshwrightError",
    "MissingCallError",
    "MixedMeshError",
    "ModelError",
    "NestedSimulationError",
    "NewerFormatError",
    "NoAnswerError",
    "NoCommunicatorError",
    "NonFiniteGradientError",
    "OperationError",
    "PickleError",
    "PlacementError",
    "PlainInBackwardError",
    "PlatformError",
    "ProgramError",
    "ProgramFileError",
    "QuantizeError",
    "RanWholeWarning",
    "RandomSourceError",
    "ReadTimeoutError",
    "ReplicaError",
    "ReshardError",
    "RewriteError",
    "RuleError",
    "SameNumbersError",
    "ScheduleError",
    "SearchError",
    "SharedMemoryError",
    "ShowError",
    "SideEffectError",
    "SimulatedRankError",
    "StageError",
    "StaleWeightsError",
    "StaticError",
    "StragglerWarning",
    "StrategyError",
    "TorchDTensorError",
    "TraceError",
    "TrainingError",
    "WeightError",
    "WriteTimeoutError",
]
