"""The distributed tensor: a local tensor with a layout, in eager mode.

core         the tensor class, absent tensors, and the state that all other modules read
capture      facts about a call without its values: its operators, strides, dtypes and gradient paths
conversion   conversion between layouts, and between distributed and plain tensors
planning     layouts of a call's operands and results, and the plan that follows from them
views        views with their own memory, and tensors that share memory
autograd     gradients, hooks and graph nodes of the whole tensor over autograd on local parts
handlers     functions and attributes of torch that are handled without a plan
execution    dispatch of an intercepted call, and the runs of planned calls
"""

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
from .autograd.user_functions import functions_told
from .conversion.distribute import (
    SPLIT,
    Arrival,
    Mark,
    distribute,
    from_local,
    lay,
    pipe_split,
    place,
    present,
    redistribute,
    whole,
)
from .conversion.pending_gradients import bucket_of, flush
from .conversion.python_values import largest_anywhere, not_finite_anywhere
from .conversion.stage_order import StageOrder, stages_of
from .conversion.whole_call import RAN_WHOLE
from .core.absent_tensor import absent
from .core.call_sites import in_backward, place_of_gradient, places_kept
from .core.capture_marks import (
    Opaque,
    captured_whole,
    capturing,
    note_spec,
    noted_spec,
    parts_recorded,
    recording_parts,
)
from .core.computation_numbers import called_for, count_step, made_alike
from .core.dist_tensor import DistTensor, stamp
from .core.initial_checksum import first_of
from .core.tree import leaves_in, map_leaves, map_tensors, tensors_in
from .execution import dispatch as dispatch
from .execution import func_transforms as func_transforms
from .handlers import direct_attributes as direct_attributes
from .handlers import padded_encoder as padded_encoder
from .handlers import sparse_constructors as sparse_constructors
from .handlers import tensor_constructors as tensor_constructors
from .handlers import torch_compile as torch_compile
from .handlers import torch_distributed as torch_distributed
from .handlers.random_draws import Source, drawing_by, random_source
from .planning.attention_algorithm import Context, attending_by, context
from .planning.decision_record import Decided, decisions, recording
from .planning.layout_decision import Decision, decide
from .torch_hooks import grouped_product, operators_recorded, transforming
from .torch_hooks import no_interception as local_parts
from .views.memory_overlap import shared_memory
from .views.shared_data import sharing_views

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

torch_compile.leave_alone()
