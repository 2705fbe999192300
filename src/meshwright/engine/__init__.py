"""The public API of Meshwright's engine: the functions and classes that users call."""

from meshwright.tensor import pipe_split

from ._auto import auto, plan
from ._checkpoint import latest_checkpoint, load_state_dict, save_state_dict
from ._checkpoint_training import Resumed, load_checkpoint, save_checkpoint
from ._clip import clip_grad_norm_
from ._context import context_parallel
from ._data import ShardDataLoader, shard_dataloader
from ._errors import (
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
from ._experts import dispatch_experts
from ._explain import Explanation, explain
from ._layers import get_rank, shard_layer
from ._left_behind import watch_left_behind
from ._local_map import LocalLayer, local_map
from ._local_step import watch_steps
from ._materialize import materialize
from ._mesh import get_mesh, init_mesh, set_mesh
from ._microbatches import microbatched
from ._optimizer import shard_optimizer
from ._parallelize import Parallelism, parallelize
from ._sampler import GlobalSampler
from ._sharding import ShardingStage1, ShardingStage2, ShardingStage3
from ._split import split_pipeline
from ._static import DistModel, to_static
from ._stop import STOPPED, stop_signals
from ._strategy import Strategy
from ._strategy_text import strategy_from_toml, strategy_to_toml
from ._styles import (
    ColwiseParallel,
    PrepareLayerInput,
    PrepareLayerOutput,
    RowwiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
    VocabParallel,
)
from ._suggest import Suggestion, said, suggest
from ._tensors import dtensor_from_fn, dtensor_from_local, reshard, shard_tensor, unshard_dtensor
from ._torch_dtensor import from_torch_dtensor, to_torch_dtensor
from ._trace import CommTrace, trace_comm
from ._trace_call import TracedCall
from ._trace_work import TracedWork
from ._train import Training, TrainingEnd, train
from ._unmarked import unmarked
from ._verify import Difference, Verified, verify
from .checks import StepChecks, check_steps

__all__ = [
    "STOPPED",
    "BatchError",
    "ColwiseParallel",
    "CommTrace",
    "Difference",
    "DifferenceError",
    "DistModel",
    "ExpertsError",
    "Explanation",
    "GlobalSampler",
    "LocalLayer",
    "LocalMapError",
    "MaterializeError",
    "NonFiniteGradientError",
    "Parallelism",
    "PrepareLayerInput",
    "PrepareLayerOutput",
    "ReplicaError",
    "Resumed",
    "RowwiseParallel",
    "SequenceParallelBegin",
    "SequenceParallelDisable",
    "SequenceParallelEnable",
    "SequenceParallelEnd",
    "ShardDataLoader",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "SharedMemoryError",
    "StaticError",
    "StepChecks",
    "Strategy",
    "StrategyError",
    "Suggestion",
    "TorchDTensorError",
    "TracedCall",
    "TracedWork",
    "Training",
    "TrainingEnd",
    "TrainingError",
    "Verified",
    "VocabParallel",
    "auto",
    "check_steps",
    "clip_grad_norm_",
    "context_parallel",
    "dispatch_experts",
    "dtensor_from_fn",
    "dtensor_from_local",
    "explain",
    "from_torch_dtensor",
    "get_mesh",
    "get_rank",
    "init_mesh",
    "latest_checkpoint",
    "load_checkpoint",
    "load_state_dict",
    "local_map",
    "materialize",
    "microbatched",
    "parallelize",
    "pipe_split",
    "plan",
    "reshard",
    "said",
    "save_checkpoint",
    "save_state_dict",
    "set_mesh",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "split_pipeline",
    "stop_signals",
    "strategy_from_toml",
    "strategy_to_toml",
    "suggest",
    "to_static",
    "to_torch_dtensor",
    "trace_comm",
    "train",
    "unmarked",
    "unshard_dtensor",
    "verify",
]

watch_steps()
watch_left_behind()
