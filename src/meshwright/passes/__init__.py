"""Passes: optimizations of programs, one file for each."""

from ._amp import Amp
from ._bucket import Bucket
from ._cancel import Cancel
from ._foreach import Foreach
from ._fuse_accumulation import FuseAccumulation
from ._fuse_activation import FuseActivation
from ._fuse_attention import FuseAttention
from ._fuse_loss import FuseLoss
from ._fuse_norm import FuseNorm
from ._hierarchy import Hierarchy
from ._inplace import InPlace
from ._linear import Linear
from ._merge import Merge
from ._recompute import Recompute, layer_of
from ._regather import Regather
from ._release import Release
from ._scatter import Scatter
from ._schedule import Schedule
from ._sequence import SequenceParallel
from ._share import Share
from ._split_products import SplitProducts
from ._tidy import Tidy
from ._zero import ShardParameters, data_axes, sharded, shards

__all__ = [
    "Amp",
    "Bucket",
    "Cancel",
    "Foreach",
    "FuseAccumulation",
    "FuseActivation",
    "FuseAttention",
    "FuseLoss",
    "FuseNorm",
    "Hierarchy",
    "InPlace",
    "Linear",
    "Merge",
    "Recompute",
    "Regather",
    "Release",
    "Scatter",
    "Schedule",
    "SequenceParallel",
    "ShardParameters",
    "Share",
    "SplitProducts",
    "Tidy",
    "data_axes",
    "layer_of",
    "sharded",
    "shards",
]
