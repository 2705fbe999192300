"""Digests of all that the results of a calibrated stage depend on: equal on every mesh, and in another process."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue
from meshwright.tensor import key_of_tree

from ._one_device import Call
from ._scheme import Scheme

FORMAT = 1
"""Version of the results of a stage: raise it when a method chooses other numbers for the same data."""
PLAIN = (bool, int, float, str, type(None))


def digest_of_scheme(scheme: Scheme) -> str:
    """Return the digest of a scheme, and of the version of its results."""
    return _digest([FORMAT, json.dumps(asdict(scheme))])


def digest_of_calls(calls: Sequence[Call]) -> str:
    """Return the digest of calibration batches: of every bit of their tensors, and of plain arguments."""
    return _digest([repr(key_of_tree(list(calls), _key_of_leaf))])


def digest_of_stage(before: str, module: nn.Module, state: Mapping[str, Tensor], layers: Iterable[str]) -> str:
    """Return the digest of a stage and of those before it: layers, classes, settings, and every bit of the state."""
    tensors = [[name, _digest_of_tensor(x)] for name, x in state.items()]
    return _digest([before, list(layers), _settings(module), tensors])


def _settings(module: nn.Module) -> list[Any]:
    """Return the class of each module, and its public attributes that are plain values, such as `eps`."""
    return [[name, type(inner).__name__, *_plain_attributes(inner)] for name, inner in module.named_modules()]


def _plain_attributes(module: nn.Module) -> list[tuple[str, str]]:
    public = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
    return sorted((name, repr(value)) for name, value in public.items() if _is_plain(value))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, PLAIN) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return isinstance(value, PLAIN)


def _key_of_leaf(x: TorchValue) -> Hashable:
    if isinstance(x, Tensor):
        return _digest_of_tensor(x)
    return x if isinstance(x, PLAIN) else type(x).__name__


def _digest_of_tensor(x: Tensor) -> str:
    """Return the digest of the dtype, the shape and every bit of a tensor."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    found = sha256(f"{x.dtype}{list(x.shape)}".encode())
    found.update(x.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest(told: Sequence[Any]) -> str:
    return sha256(json.dumps(told).encode()).hexdigest()
