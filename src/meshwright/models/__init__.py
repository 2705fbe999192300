"""Models written for one device and marked for any mesh, and the loop that trains them.

This package contains the model files, their training text, and the main training job. It uses only public functions,
and does not depend on how marks are applied.
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
