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
from .autograd.backward_handlers import around_backward
from .autograd.user_functions import functions_passed_to
from .conversion.distribute import (
    STAGE_SPLIT,
    ReshardMark,
    StageArrival,
    as_dist_tensor,
    distribute,
    distribute_as,
    from_local,
    full_tensor,
    keep_own_part,
    pipe_split,
    redistribute,
)
from .conversion.gradient_buckets import bucket_of
from .conversion.joint_gather import JointGather, can_gather_jointly
from .conversion.joint_plan import gathered_axes
from .conversion.pending_gradients import flush
from .conversion.python_values import largest_anywhere, not_finite_anywhere
from .conversion.stage_order import StageOrder, from_all_ranks, returns_to, stages_of
from .conversion.whole_call import RAN_WHOLE
from .core.absent_tensor import absent
from .core.call_sites import call_site_of_gradient, call_sites_kept, in_backward
from .core.capture_marks import (
    Opaque,
    captured_whole,
    capturing,
    in_capture,
    note_spec,
    noted_spec,
    parts_recorded,
    recording_parts,
)
from .core.computation_numbers import (
    collectives_of_call,
    number_by_values,
    renumber_gradients,
    renumber_parameters,
    values_equal_on_ranks,
)
from .core.dist_tensor import DistTensor, as_part
from .core.environment_hash import input_numbers
from .core.initial_checksum import initial_checksum_of
from .core.other_libraries import check_library
from .core.tree import key_of_tree, leaves_in, map_leaves, map_tensors, tensors_in
from .core.write_counts import Mark, mark_of
from .execution import dispatch as dispatch
from .execution import func_transforms as func_transforms
from .execution.few_row_products import (
    fast_products,
    has_fast_products,
    has_values,
    has_wide_vectors,
    product,
    products_are_fast,
    sum_with_product,
)
from .execution.native_kernel import kernel_folder, native_kernel, processor
from .handlers import direct_attributes as direct_attributes
from .handlers import padded_encoder as padded_encoder
from .handlers import sparse_constructors as sparse_constructors
from .handlers import tensor_constructors as tensor_constructors
from .handlers import torch_compile as torch_compile
from .handlers import torch_distributed as torch_distributed
from .handlers.random_draws import RandomSource, current_random_source, random_source
from .planning.attention_algorithm import Context, attention_algorithm, using_attention
from .planning.decision_record import CallRecord, decisions, recording
from .planning.layout_decision import Decision, decide
from .torch_hooks import (
    Operator,
    OperatorPacket,
    active_function_modes,
    backward_running,
    grouped_product,
    interception_on,
    is_of_transform,
    jit_tracing,
    modes_active,
    modes_before_dispatch,
    operators_recorded,
    returns_dtype,
    transforming,
)
from .torch_hooks import no_interception as local_parts
from .views.memory_overlap import shared_memory
from .views.shared_data import sharing_views

__all__ = [
    "RAN_WHOLE",
    "STAGE_SPLIT",
    "AbsentError",
    "CallRecord",
    "CollectiveError",
    "CompileError",
    "Context",
    "Decision",
    "DistTensor",
    "JointGather",
    "LocalShapeError",
    "Mark",
    "MemoryAccessError",
    "MixedMeshError",
    "Opaque",
    "OperationError",
    "Operator",
    "OperatorPacket",
    "PickleError",
    "PlainInBackwardError",
    "RanWholeWarning",
    "RandomSource",
    "RandomSourceError",
    "ReshardMark",
    "SimulatedRankError",
    "StageArrival",
    "StageOrder",
    "TraceError",
    "absent",
    "active_function_modes",
    "around_backward",
    "as_dist_tensor",
    "as_part",
    "attention_algorithm",
    "backward_running",
    "bucket_of",
    "call_site_of_gradient",
    "call_sites_kept",
    "can_gather_jointly",
    "captured_whole",
    "capturing",
    "check_library",
    "collectives_of_call",
    "current_random_source",
    "decide",
    "decisions",
    "distribute",
    "distribute_as",
    "fast_products",
    "flush",
    "from_all_ranks",
    "from_local",
    "full_tensor",
    "functions_passed_to",
    "gathered_axes",
    "grouped_product",
    "has_fast_products",
    "has_values",
    "has_wide_vectors",
    "in_backward",
    "in_capture",
    "initial_checksum_of",
    "input_numbers",
    "interception_on",
    "is_of_transform",
    "jit_tracing",
    "keep_own_part",
    "kernel_folder",
    "key_of_tree",
    "largest_anywhere",
    "leaves_in",
    "local_parts",
    "map_leaves",
    "map_tensors",
    "mark_of",
    "modes_active",
    "modes_before_dispatch",
    "native_kernel",
    "not_finite_anywhere",
    "note_spec",
    "noted_spec",
    "number_by_values",
    "operators_recorded",
    "parts_recorded",
    "pipe_split",
    "processor",
    "product",
    "products_are_fast",
    "random_source",
    "recording",
    "recording_parts",
    "redistribute",
    "renumber_gradients",
    "renumber_parameters",
    "returns_dtype",
    "returns_to",
    "shared_memory",
    "sharing_views",
    "stages_of",
    "sum_with_product",
    "tensors_in",
    "transforming",
    "using_attention",
    "values_equal_on_ranks",
]

torch_compile.leave_alone()
