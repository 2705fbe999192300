"""Weights of a model that trains and of one that generates: moves between their layouts, versions, and streams.

_errors      WeightError, StaleWeightsError
_tensors     the tensors of a model by name, their parts, and their replacement
_versions    Versions: numbers for the states of a model's weights
_pairs       TensorPair: the tensors with one name in both models, and shared memory
_rounds      Round: pieces of tensors whose messages fit into a memory cap
_sync        sync, Link: give a sampler the trainer's weights, and refuse stale ones
_hub_names   names and tensors of checkpoints of transformers
_stream      stream: names, parts and layouts for other engines
"""

from ._errors import StaleWeightsError, WeightError
from ._stream import StreamedWeight, stream
from ._sync import Synced, is_compared, release, restore, sync, version_to_sample

__all__ = [
    "StaleWeightsError",
    "StreamedWeight",
    "Synced",
    "WeightError",
    "is_compared",
    "release",
    "restore",
    "stream",
    "sync",
    "version_to_sample",
]
