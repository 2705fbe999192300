"""The door: what users call."""

from meshwright.tensor import pipe_split

from ._auto import auto, plan
from ._data import ShardDataLoader, shard_dataloader
from ._errors import BatchError, LocalMapError, StaticError, StrategyError, TorchDTensorError
from ._explain import Explanation, explain
from ._layers import get_rank, shard_layer
from ._local_map import LocalLayer, local_map
from ._mesh import get_mesh, set_mesh
from ._microbatches import microbatched
from ._optimizer import shard_optimizer
from ._split import split_pipeline
from ._static import DistModel, to_static
from ._strategy import Strategy
from ._strategy_text import strategy_from_toml, strategy_to_toml
from ._tensors import dtensor_from_fn, dtensor_from_local, reshard, shard_tensor, unshard_dtensor
from ._torch_dtensor import from_torch_dtensor, to_torch_dtensor

__all__ = [
    "BatchError",
    "DistModel",
    "Explanation",
    "LocalLayer",
    "LocalMapError",
    "ShardDataLoader",
    "StaticError",
    "Strategy",
    "StrategyError",
    "TorchDTensorError",
    "auto",
    "dtensor_from_fn",
    "dtensor_from_local",
    "explain",
    "from_torch_dtensor",
    "get_mesh",
    "get_rank",
    "local_map",
    "microbatched",
    "pipe_split",
    "plan",
    "reshard",
    "set_mesh",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "split_pipeline",
    "strategy_from_toml",
    "strategy_to_toml",
    "to_static",
    "to_torch_dtensor",
    "unshard_dtensor",
]
