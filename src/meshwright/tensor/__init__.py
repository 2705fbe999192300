"""The distributed tensor: a local tensor with a layout, in eager mode."""

from . import _collectives as _collectives
from . import _compile as _compile
from . import _constructors as _constructors
from . import _dispatch as _dispatch
from . import _padded_encoder as _padded_encoder
from . import _questions as _questions
from . import _sparse as _sparse
from . import _transforms as _transforms
from ._absent import absent
from ._context import Context, attending_by, context
from ._decide import Decision, decide
from ._dist_tensor import DistTensor, stamp
from ._errors import (
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
from ._explain import Decided, decisions, recording
from ._first_values import first_of
from ._functions import functions_told
from ._handle_values import largest_anywhere, not_finite_anywhere
from ._identity import called_for, count_step, made_alike
from ._make import SPLIT, Arrival, Mark, distribute, from_local, lay, pipe_split, place, present, redistribute, whole
from ._marks import Opaque, captured_whole, capturing, note_spec, noted_spec, parts_recorded, recording_parts
from ._memory_overlap import shared_memory
from ._pending import bucket_of, flush
from ._places import in_backward, place_of_gradient, places_kept
from ._random import Source, drawing_by, random_source
from ._shared_data import sharing_views
from ._stage_order import StageOrder, stages_of
from ._tree import leaves_in, map_leaves, map_tensors, tensors_in
from ._whole import RAN_WHOLE
from .torch_hooks import grouped_product, operators_recorded, transforming
from .torch_hooks import no_interception as local_parts

__all__ = [
    "RAN_WHOLE",
    "SPLIT",
    "AbsentError",
    "Arrival",
    "CollectiveError",
    "CompileError",
    "Context",
    "Decided",
    "Decision",
    "DistTensor",
    "LocalShapeError",
    "Mark",
    "MemoryAccessError",
    "MixedMeshError",
    "Opaque",
    "OperationError",
    "PickleError",
    "PlainInBackwardError",
    "RanWholeWarning",
    "RandomSourceError",
    "SimulatedRankError",
    "Source",
    "StageOrder",
    "TraceError",
    "absent",
    "attending_by",
    "bucket_of",
    "called_for",
    "captured_whole",
    "capturing",
    "context",
    "count_step",
    "decide",
    "decisions",
    "distribute",
    "drawing_by",
    "first_of",
    "flush",
    "from_local",
    "functions_told",
    "grouped_product",
    "in_backward",
    "largest_anywhere",
    "lay",
    "leaves_in",
    "local_parts",
    "made_alike",
    "map_leaves",
    "map_tensors",
    "not_finite_anywhere",
    "note_spec",
    "noted_spec",
    "operators_recorded",
    "parts_recorded",
    "pipe_split",
    "place",
    "place_of_gradient",
    "places_kept",
    "present",
    "random_source",
    "recording",
    "recording_parts",
    "redistribute",
    "shared_memory",
    "sharing_views",
    "stages_of",
    "stamp",
    "tensors_in",
    "transforming",
    "whole",
]

_compile.leave_alone()
