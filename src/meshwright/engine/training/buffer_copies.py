"""Copies of buffers for backward passes that run after forward passes of later microbatches.

On one device, the backward pass of a microbatch reads buffers as its own forward pass left them. In the order of a
pipeline, forward passes of later microbatches may write to the buffers before. So autograd saves copies of buffers that
forward passes write to.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.pipeline import StageError
from meshwright.tensor import local_parts


class BufferCopies:
    """The buffers of a model that forward passes write to, found in the first forward pass by their elements.

    Later writes are found by the buffers' versions. That misses writes through `.data`, which torch does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[str] | None = None

    @contextmanager
    def during(self) -> Generator[None]:
        """Save copies of these buffers for the backward pass of what runs in the context."""
        buffers = {name: x for name, x in self._model.named_buffers() if not x.is_inference()}
        with local_parts():
            before = _versions(buffers)
            values = {name: x.clone() for name, x in buffers.items()} if self._written is None else {}
        with self._saving_copies(buffers):
            yield
        with local_parts():
            changed = {name for name, version in _versions(buffers).items() if version != before[name]}
            changed.update(name for name, x in values.items() if not torch.equal(x, buffers[name]))
        self._written = changed | (self._written or set())

    def _saving_copies(self, buffers: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Return a context in which autograd saves copies of the written buffers; of all, if these are not known."""
        names = buffers.keys() if self._written is None else self._written & buffers.keys()
        with local_parts():
            memories = {_memory(buffers[name]) for name in names} - {0}
        return _copied(memories) if memories else nullcontext()


def _versions(buffers: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: x._version for name, x in buffers.items()}


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _copied(memories: Collection[int]) -> saved_tensors_hooks:
    """Return a context in which autograd saves copies of tensors in this memory."""

    def pack(x: Tensor) -> tuple[Tensor, int]:
        with local_parts():
            is_buffer = not x.requires_grad and x.layout is torch.strided and _memory(x) in memories
            kept = x.clone() if is_buffer else x
            return kept, kept._version

    return saved_tensors_hooks(pack, _unwritten)


def _unwritten(packed: tuple[Tensor, int]) -> Tensor:
    """Return the saved tensor; raise StageError if it was written to, which torch does not check where hooks save."""
    x, version = packed
    with local_parts():
        if x._version == version:
            return x
        raise StageError(
            "a backward pass of a microbatch",
            f"a tensor of shape {tuple(x.shape)} that a forward pass has written to since",
            "the backward pass needs the value that its own forward pass read",
            "make a new tensor in forward (x = x * 0.5) instead of the write in place (x.mul_(0.5)); or use "
            "mw.to_static",
        )
