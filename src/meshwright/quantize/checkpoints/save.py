"""Save a quantized model in the form of compressed-tensors: safetensors files, and a config.json.

The state of the model is the content of the files, so the saver of checkpoints does the work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.checkpoint import Format, SaveJob, format_of, save, write_new
from meshwright.layout import JsonValue

from .._errors import QuantizeError
from .compressed_tensors_form import config_of
from .file_tensor import CONFIG, held


def save_quantized(model: nn.Module, path: str | os.PathLike[str], *, files: Mapping[str, bytes] | None = None) -> None:
    """Write a quantized model into the new folder `path`, for transformers, vLLM, and `load_quantized`.

    Every rank makes the call. The folder has safetensors files in the form of compressed-tensors, and a config.json:
    that of the model, if it has one as models of transformers do, with the quantization added. It appears complete, or
    not at all. If layers of the class Conv1D or experts are quantized, only `load_quantized` reads the folder. `files`
    are further files of the folder by name, such as those of a tokenizer.

    Raises:
        QuantizeError: no layer is quantized, compressed-tensors does not know the numbers, or a further file has the
            name of a file of the checkpoint, or one outside of the folder.
        CheckpointError: the files cannot be written; raised on every rank.
    """
    _check_files(files or {})
    own: Any = getattr(model, "config", None)
    config: dict[str, Any] = own.to_dict() if hasattr(own, "to_dict") else {}
    text = json.dumps(config | {"quantization_config": config_of(model)}, indent=2)
    tensors = {name: held(x) for name, x in _state(model)}
    beside = {**(files or {}), CONFIG: (text + "\n").encode()}
    save(path, tensors, {}, _WithFiles(format_of("safetensors"), beside)).wait()


def _check_files(files: Mapping[str, object]) -> None:
    """Raise QuantizeError if further files are no bytes, or cannot be files of the folder."""
    for name, content in files.items():
        is_name = name not in ("", ".", "..") and os.path.basename(name) == name
        is_own = name == CONFIG or (name.startswith("model") and ".safetensors" in name)
        if not is_name or is_own or not isinstance(content, bytes):
            raise QuantizeError(
                f"save {name!r} beside a quantized model",
                f"a {type(content).__name__}" if is_name and not is_own else f"the name {name!r}",
                "further files are bytes, and have names in the new folder that the checkpoint does not use",
                'pass files={"tokenizer.json": path.read_bytes()}',
            )


@dataclass(frozen=True, slots=True)
class _WithFiles:
    """The format of model hubs, and files beside it, such as config.json."""

    files: Format
    beside: Mapping[str, bytes]

    def prepared(self, job: SaveJob) -> Callable[[], JsonValue]:
        return self.files.prepared(job)

    def finish(self, job: SaveJob, reports: Sequence[JsonValue]) -> None:
        for name, content in self.beside.items():
            write_new(job.folder / name, content)
        self.files.finish(job, reports)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's state; a tensor with two names has the first of them."""
    seen: set[int] = set()
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and id(x) not in seen:
            seen.add(id(x))
            yield name, x
