"""The distributed tensor: a local tensor with a layout on it, in eager mode."""

from . import _dispatch
from ._dist_tensor import DistTensor
from ._errors import (
    AbsentError,
    LocalShapeError,
    MixedMeshError,
    OperationError,
    PickleError,
    PlainInBackwardError,
    RandomSourceError,
    RanWholeWarning,
)
from ._explain import Decided, decisions
from ._make import distribute, from_local, redistribute, whole
from ._random import random_source

RAN_WHOLE = _dispatch.RAN_WHOLE

__all__ = [
    "RAN_WHOLE",
    "AbsentError",
    "Decided",
    "DistTensor",
    "LocalShapeError",
    "MixedMeshError",
    "OperationError",
    "PickleError",
    "PlainInBackwardError",
    "RanWholeWarning",
    "RandomSourceError",
    "decisions",
    "distribute",
    "from_local",
    "random_source",
    "redistribute",
    "whole",
]
