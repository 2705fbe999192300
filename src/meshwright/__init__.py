"""Meshwright: automatic parallel training on PyTorch.

Write the model for one device, mark a few tensors, and the same marks run it on any mesh.
Names are imported when they are first used, so that `meshwright --help` does not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright import errors as errors
    from meshwright import weights as weights
    from meshwright.comm import get_rank as get_rank
    from meshwright.comm import init_process as init_process
    from meshwright.comm import prefix_prints as prefix_prints
    from meshwright.comm import simulate as simulate
    from meshwright.comm import stragglers as stragglers
    from meshwright.engine import ColwiseParallel as ColwiseParallel
    from meshwright.engine import DistModel as DistModel
    from meshwright.engine import GlobalSampler as GlobalSampler
    from meshwright.engine import LocalLayer as LocalLayer
    from meshwright.engine import Parallelism as Parallelism
    from meshwright.engine import PrepareLayerInput as PrepareLayerInput
    from meshwright.engine import PrepareLayerOutput as PrepareLayerOutput
    from meshwright.engine import RowwiseParallel as RowwiseParallel
    from meshwright.engine import SequenceParallelBegin as SequenceParallelBegin
    from meshwright.engine import SequenceParallelDisable as SequenceParallelDisable
    from meshwright.engine import SequenceParallelEnable as SequenceParallelEnable
    from meshwright.engine import SequenceParallelEnd as SequenceParallelEnd
    from meshwright.engine import ShardingStage1 as ShardingStage1
    from meshwright.engine import ShardingStage2 as ShardingStage2
    from meshwright.engine import ShardingStage3 as ShardingStage3
    from meshwright.engine import StepChecks as StepChecks
    from meshwright.engine import Strategy as Strategy
    from meshwright.engine import Training as Training
    from meshwright.engine import TrainingEnd as TrainingEnd
    from meshwright.engine import VocabParallel as VocabParallel
    from meshwright.engine import auto as auto
    from meshwright.engine import check_steps as check_steps
    from meshwright.engine import clip_grad_norm_ as clip_grad_norm_
    from meshwright.engine import context_parallel as context_parallel
    from meshwright.engine import dispatch_experts as dispatch_experts
    from meshwright.engine import document_attention as document_attention
    from meshwright.engine import dtensor_from_fn as dtensor_from_fn
    from meshwright.engine import dtensor_from_local as dtensor_from_local
    from meshwright.engine import explain as explain
    from meshwright.engine import from_torch_dtensor as from_torch_dtensor
    from meshwright.engine import get_mesh as get_mesh
    from meshwright.engine import init_mesh as init_mesh
    from meshwright.engine import latest_checkpoint as latest_checkpoint
    from meshwright.engine import load_checkpoint as load_checkpoint
    from meshwright.engine import load_state_dict as load_state_dict
    from meshwright.engine import local_map as local_map
    from meshwright.engine import materialize as materialize
    from meshwright.engine import microbatched as microbatched
    from meshwright.engine import parallelize as parallelize
    from meshwright.engine import pipe_split as pipe_split
    from meshwright.engine import plan as plan
    from meshwright.engine import reshard as reshard
    from meshwright.engine import save_checkpoint as save_checkpoint
    from meshwright.engine import save_state_dict as save_state_dict
    from meshwright.engine import set_mesh as set_mesh
    from meshwright.engine import shard_dataloader as shard_dataloader
    from meshwright.engine import shard_layer as shard_layer
    from meshwright.engine import shard_optimizer as shard_optimizer
    from meshwright.engine import shard_tensor as shard_tensor
    from meshwright.engine import split_pipeline as split_pipeline
    from meshwright.engine import strategy_from_toml as strategy_from_toml
    from meshwright.engine import strategy_to_toml as strategy_to_toml
    from meshwright.engine import to_static as to_static
    from meshwright.engine import to_torch_dtensor as to_torch_dtensor
    from meshwright.engine import trace_comm as trace_comm
    from meshwright.engine import train as train
    from meshwright.engine import unshard_dtensor as unshard_dtensor
    from meshwright.engine import verify as verify
    from meshwright.fixed_order import same_numbers as same_numbers
    from meshwright.generate import sampler as sampler
    from meshwright.layout import MeshwrightError as MeshwrightError
    from meshwright.layout import Partial as Partial
    from meshwright.layout import Placement as Placement
    from meshwright.layout import Platform as Platform
    from meshwright.layout import ProcessMesh as ProcessMesh
    from meshwright.layout import Replicate as Replicate
    from meshwright.layout import Shard as Shard
    from meshwright.layout import register_platform as register_platform
    from meshwright.quantize import convert_to_float8_training as convert_to_float8_training
    from meshwright.quantize import load_quantized as load_quantized
    from meshwright.quantize import prepare_qat as prepare_qat
    from meshwright.quantize import quantize as quantize
    from meshwright.quantize import save_quantized as save_quantized
    from meshwright.report import show as show
    from meshwright.spmd import register_rule as register_rule
    from meshwright.tensor import DistTensor as DistTensor
    from meshwright.tensor import random_source as random_source

__version__ = "0.1.0"

__all__ = [
    "ColwiseParallel",
    "DistModel",
    "DistTensor",
    "GlobalSampler",
    "LocalLayer",
    "MeshwrightError",
    "Parallelism",
    "Partial",
    "Placement",
    "Platform",
    "PrepareLayerInput",
    "PrepareLayerOutput",
    "ProcessMesh",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallelBegin",
    "SequenceParallelDisable",
    "SequenceParallelEnable",
    "SequenceParallelEnd",
    "Shard",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "StepChecks",
    "Strategy",
    "Training",
    "TrainingEnd",
    "VocabParallel",
    "__version__",
    "auto",
    "check_steps",
    "clip_grad_norm_",
    "context_parallel",
    "convert_to_float8_training",
    "dispatch_experts",
    "document_attention",
    "dtensor_from_fn",
    "dtensor_from_local",
    "errors",
    "explain",
    "from_torch_dtensor",
    "get_mesh",
    "get_rank",
    "init_mesh",
    "init_process",
    "latest_checkpoint",
    "load_checkpoint",
    "load_quantized",
    "load_state_dict",
    "local_map",
    "materialize",
    "microbatched",
    "parallelize",
    "pipe_split",
    "plan",
    "prefix_prints",
    "prepare_qat",
    "quantize",
    "random_source",
    "register_platform",
    "register_rule",
    "reshard",
    "same_numbers",
    "sampler",
    "save_checkpoint",
    "save_quantized",
    "save_state_dict",
    "set_mesh",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "show",
    "simulate",
    "split_pipeline",
    "stragglers",
    "strategy_from_toml",
    "strategy_to_toml",
    "to_static",
    "to_torch_dtensor",
    "trace_comm",
    "train",
    "unshard_dtensor",
    "verify",
    "weights",
]

_NAMES = frozenset(__all__) - {"__version__"}
_import_name = import_module("meshwright.layout").lazy_names(__name__)  # no name of the API, which an import would be


def __getattr__(name: str) -> Any:
    if name in ("errors", "weights"):
        return import_module(f"meshwright.{name}")
    if name in _NAMES:
        return _import_name(name)
    found = getattr(import_module("meshwright.errors"), name, None) if name.endswith(("Error", "Warning")) else None
    if found is None:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return sorted(_NAMES)


class _Api(ModuleType):
    """This module, in which `mw.reshard` is the function, although there is a package of that name too.

    The import of a subpackage sets its name on this module. If the API has a function of that name, the function stays.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Api
