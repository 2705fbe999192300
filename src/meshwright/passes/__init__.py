"""Passes: one file per optimisation."""

from ._bucket import Bucket
from ._cancel import Cancel
from ._foreach import Foreach
from ._fuse_activation import FuseActivation
from ._fuse_attention import FuseAttention
from ._fuse_loss import FuseLoss
from ._fuse_norm import FuseNorm
from ._hierarchy import Hierarchy
from ._inplace import InPlace
from ._linear import Linear
from ._recompute import Recompute
from ._regather import Regather
from ._scatter import Scatter
from ._sequence import SequenceParallel
from ._share import Share
from ._tidy import Tidy
from ._zero import ShardParameters, data_axes, shards

__all__ = [
    "Bucket",
    "Cancel",
    "Foreach",
    "FuseActivation",
    "FuseAttention",
    "FuseLoss",
    "FuseNorm",
    "Hierarchy",
    "InPlace",
    "Linear",
    "Recompute",
    "Regather",
    "Scatter",
    "SequenceParallel",
    "ShardParameters",
    "Share",
    "Tidy",
    "data_axes",
    "shards",
]
