"""Conditions that must be equal on all ranks beside their program: versions, settings, random states, whole tensors."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from meshwright.comm import is_noted, note_fact
from meshwright.layout import generator_state

from .dist_tensor import DistTensor

_VARIABLES = ("MESHWRIGHT_CHECK", "MESHWRIGHT_DEBUG")
"""Environment variables that change the messages between ranks."""

_PYTHON = "python"
_NAMES = (
    _PYTHON, "torch", "numpy", "torch.get_default_dtype()", "torch.are_deterministic_algorithms_enabled()",
    "torch.get_float32_matmul_precision()", *_VARIABLES,
)  # fmt: skip
"""Names of the versions and settings. The first is the oldest fact, and so the first that may have been dropped."""

_SMALL = 1 << 20
"""Most bytes of an input whose checksum is computed in every run."""


class _Latest:
    """The settings of the latest hash, and the hash."""

    settings: tuple[object, ...] = ()
    found = 0


def environment_hash() -> int:
    """Return a hash of the versions and settings of this process, and note them as facts."""
    settings = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *[os.environ.get(name, "") for name in _VARIABLES],
    )
    if settings != _Latest.settings or not is_noted(_PYTHON):
        values = [platform.python_version(), torch.__version__, np.__version__, *settings]
        for name, value in zip(_NAMES, values, strict=True):
            note_fact(name, value)
        _Latest.settings, _Latest.found = settings, crc32(repr(values).encode())
    return _Latest.found


def random_state(device: torch.device, generator: torch.Generator | None) -> int:
    """Return a checksum of the state of a generator; of the device's default one if `generator` is None."""
    note_fact("torch.initial_seed()", torch.initial_seed())
    held = generator.get_state() if generator is not None else generator_state(device)
    found = crc32(held.numpy().data)
    note_fact(f"state of the random generator of {device.type} before its last use", found)
    return found


def input_numbers(inputs: Iterable[object], run: int) -> list[int]:
    """Return the numbers of a program's inputs, equal on all ranks: of a plain tensor, the checksum of its values.

    Large plain tensors count at runs 1, 2, 4, 8, …, because their checksums take long.
    """
    return [_input_number(at, x, run & (run - 1) == 0) for at, x in enumerate(inputs) if isinstance(x, Tensor)]


def _input_number(at: int, x: Tensor, is_long: bool) -> int:
    if isinstance(x, DistTensor):
        return x._number
    found = checksum(x) if is_long or x.numel() * x.itemsize <= _SMALL else 0
    note_fact(f"checksum of input {at} of the program", found)
    return found


def checksum(x: Tensor | None) -> int:
    """Return a checksum of a tensor on the CPU, or of a leaf that requires a gradient; 0 for any other."""
    if x is None or x.is_meta or (x.device.type != "cpu" and not (x.is_leaf and x.requires_grad)):
        return 0
    plain = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return crc32(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else 0
