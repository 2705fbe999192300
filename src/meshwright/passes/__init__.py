"""Passes: optimizations of programs, one module for each.

In reading order:

    strategies      how the training step is computed: precision, sharding, gradient accumulation
    operators       fewer and larger operators: removal, merging, fusion
    communication   fewer and smaller collectives, and their overlap with operators
    memory          less memory: recomputation, early release, reuse in place
"""

from .communication.bucket import Bucket
from .communication.conversion_chains import Cancel
from .communication.deferred_reductions import Linear
from .communication.hierarchical_all_reduce import Hierarchy
from .communication.overlap_schedule import OverlapSchedule
from .communication.reduce_scatter import Scatter
from .communication.split_products import SplitProducts
from .memory.early_release import Release
from .memory.in_place import InPlace
from .memory.recompute import Recompute, layer_of
from .memory.regather import Regather
from .operators.common_subexpressions import Share
from .operators.foreach import Foreach
from .operators.fuse_accumulation import FuseAccumulation
from .operators.fuse_activation import FuseActivation
from .operators.fuse_attention import FuseAttention
from .operators.fuse_loss import FuseLoss
from .operators.fuse_norm import FuseNorm
from .operators.identity_removal import Tidy
from .operators.one_row_products import OneRowProducts
from .strategies.amp import Amp
from .strategies.gradient_accumulation import Merge
from .strategies.sequence_parallel import SequenceParallel
from .strategies.shard_parameters import ShardParameters, batch_axes, further_sharded, further_sharded_specs

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
    "OneRowProducts",
    "OverlapSchedule",
    "Recompute",
    "Regather",
    "Release",
    "Scatter",
    "SequenceParallel",
    "ShardParameters",
    "Share",
    "SplitProducts",
    "Tidy",
    "batch_axes",
    "further_sharded",
    "further_sharded_specs",
    "layer_of",
]
