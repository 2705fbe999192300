"""The public API of Meshwright's engine: the functions and classes that users call.

marks         distribute tensors, layers and experts over a mesh, from inside a model
eager         make a model parallel without recording: styles, pipeline split, optimizers, ZeRO
checks        checks before each update of an optimizer: finite gradients, equal replicas
recording     what a program is recorded from, and when a recorded program may run again
static        `to_static`: build, run, save and load the programs of a model
training      the training loop, its data loader, microbatches and checkpoints
planning      apply plans that the search finds: `auto`, `suggest`, scripts without marks
diagnostics   `explain`, `trace_comm` and `verify`: show and check what a program does
_errors       the errors of the engine's public functions
torch_hooks   the private names of torch that the engine needs, each with the reason
"""

from meshwright.tensor import pipe_split

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
from .checks import StepChecks, check_steps
from .diagnostics.comm_trace import CommTrace, trace_comm
from .diagnostics.explain import Explanation, explain
from .diagnostics.traced_call import TracedCall
from .diagnostics.traced_work import TracedWork
from .diagnostics.verify import Difference, Verified, verify
from .eager.local_step import watch_steps
from .eager.optimizer import shard_optimizer
from .eager.parallelize import Parallelism, parallelize
from .eager.split_pipeline import split_pipeline
from .eager.styles import (
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
from .eager.zero import ShardingStage1, ShardingStage2, ShardingStage3
from .marks.context_parallel import context_parallel
from .marks.default_mesh import get_mesh, init_mesh, set_mesh
from .marks.document_attention import document_attention
from .marks.experts import dispatch_experts
from .marks.layers import shard_layer
from .marks.local_map import LocalLayer, local_map
from .marks.materialize import materialize
from .marks.stale_parameters import refuse_stale_parameters
from .marks.tensors import dtensor_from_fn, dtensor_from_local, reshard, shard_tensor, unshard_dtensor
from .marks.torch_dtensor import from_torch_dtensor, to_torch_dtensor
from .planning.auto import auto, plan
from .planning.suggest import Suggestion, style_code, suggest
from .planning.unmarked import unmarked
from .recording.strategy import Strategy
from .recording.strategy_toml import strategy_from_toml, strategy_to_toml
from .static.to_static import DistModel, to_static
from .training.clip_grad_norm import clip_grad_norm_
from .training.data_loader import ShardDataLoader, shard_dataloader
from .training.equal_options import check_equal_options
from .training.microbatches import microbatched
from .training.sampler import GlobalSampler
from .training.state_checkpoint import latest_checkpoint, load_state_dict, save_state_dict
from .training.stop_signals import STOPPED, stop_signals
from .training.train import Training, TrainingEnd, train
from .training.training_checkpoint import Resumed, load_checkpoint, save_checkpoint

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
    "check_equal_options",
    "check_steps",
    "clip_grad_norm_",
    "context_parallel",
    "dispatch_experts",
    "document_attention",
    "dtensor_from_fn",
    "dtensor_from_local",
    "explain",
    "from_torch_dtensor",
    "get_mesh",
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
    "style_code",
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
refuse_stale_parameters()
