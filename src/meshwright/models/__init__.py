"""Models written for one device and marked for any mesh, and the loop that trains them.

Knows: model files, their text and the main job. Does not know: how a mark is carried out.
"""

from meshwright.models._corpus import batch, corpus
from meshwright.models._llama import Llama, LlamaConfig, ModelError, mark
from meshwright.models._train import AXES, Job, largest_difference, train, train_on, train_on_mesh

__all__ = [
    "AXES",
    "Job",
    "Llama",
    "LlamaConfig",
    "ModelError",
    "batch",
    "corpus",
    "largest_difference",
    "mark",
    "train",
    "train_on",
    "train_on_mesh",
]
