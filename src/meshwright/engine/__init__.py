"""The door: what users call."""

from ._layers import LocalLayer, get_rank, local_map, shard_layer
from ._mesh import get_mesh, set_mesh
from ._tensors import dtensor_from_fn, dtensor_from_local, reshard, shard_tensor, unshard_dtensor

__all__ = [
    "LocalLayer",
    "dtensor_from_fn",
    "dtensor_from_local",
    "get_mesh",
    "get_rank",
    "local_map",
    "reshard",
    "set_mesh",
    "shard_layer",
    "shard_tensor",
    "unshard_dtensor",
]
