"""Passes: one file per optimisation."""

from ._fuse_activation import FuseActivation
from ._fuse_attention import FuseAttention
from ._fuse_loss import FuseLoss
from ._fuse_norm import FuseNorm
from ._tidy import Tidy

__all__ = [
    "FuseActivation",
    "FuseAttention",
    "FuseLoss",
    "FuseNorm",
    "Tidy",
]
