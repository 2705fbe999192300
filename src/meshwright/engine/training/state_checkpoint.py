"""Save and load states: nested dicts of tensors, distributed or not, and of Python values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint import (
    CheckpointError,
    HeldTensor,
    LoadReport,
    Saving,
    format_of,
    latest_step,
    load,
    open_together,
    save,
)
from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor

Where = str | os.PathLike[str]


def save_state_dict(
    state: Mapping[str, Any],
    path: Where,
    *,
    format: str = "meshwright",
    async_save: bool = False,
    keep: int | None = None,
) -> Saving:
    """Write a state as a checkpoint, the new folder `path`; every rank calls it with its own tensors.

    `state` is a nested dict of tensors and Python values; a plain tensor counts as replicated on the ranks that have
    it. The folder appears complete, or not at all. With `async_save` the tensors are copied and threads write them.
    `wait()` of the returned Saving returns when the checkpoint is complete, or raises the error. An error that nobody
    waited for is reported by a CheckpointWarning at the next save, which is still made, or at the end of the program.
    With `keep`, only so many folders `step_…` are kept beside it. `format` is "meshwright", "safetensors" or "dcp".

    Raises:
        CheckpointError: the state cannot be saved; raised on every rank.
        FolderInUseError: another job saves into this folder of steps.
    """
    tensors, values = _held(state)
    saving = save(path, tensors, values, format_of(format), async_save, keep)
    if not async_save:
        saving.wait()
    return saving


def load_state_dict(state: MutableMapping[str, Any], path: Where, *, strict: bool = True) -> LoadReport:
    """Fill a state in place from a checkpoint of any mesh, layout or format; every rank calls it with its own tensors.

    Each rank reads the slices that it holds. Python values of the checkpoint replace those in `state`. If `path` is a
    folder of steps, the latest complete one is read. The names in `state` must have been saved, with the same shapes
    and dtypes; the error lists all that were not. With `strict=False`, tensors that fit are loaded, and the rest stay
    as they were. The report has `missing_keys`, `unexpected_keys` (saved, but not in `state`) and `mismatched` (name →
    the difference).

    Raises:
        CheckpointError: the state does not fit; no tensor has been written.
        ReadTimeoutError: the file system does not answer.
    """
    catalogue = open_together(path)
    tensors, values = _held(state)
    report = load(catalogue, tensors, values, strict=strict)
    kept = {name: value for name, value in catalogue.values.items() if name not in report.mismatched}
    _filled(state, "", kept)
    return report


def latest_checkpoint(folder: Where) -> Path | None:
    """Return the latest complete checkpoint among the folders `step_…` in `folder`, or None."""
    return latest_step(folder)


def held(x: Tensor) -> HeldTensor:
    """Return a tensor as this rank holds it; the part shares its memory."""
    return HeldTensor(x.to_local().detach(), x.spec) if isinstance(x, DistTensor) else HeldTensor(x.detach())


def _held(state: TorchValue) -> tuple[dict[str, HeldTensor], dict[str, Any]]:
    """Return the tensors and the values of a state, by name."""
    tensors: dict[str, HeldTensor] = {}
    values: dict[str, Any] = {}
    for name, leaf in _leaves("", state):
        if name in tensors or name in values:
            raise CheckpointError(
                f"a state with {name}",
                "two values with that name",
                "a name consists of the keys, joined by dots",
                "use keys whose joined names differ",
            )
        if isinstance(leaf, Tensor):
            tensors[name] = held(leaf)
        else:
            values[name] = leaf
    return tensors, values


def _leaves(name: str, tree: TorchValue) -> Iterator[tuple[str, Any]]:
    for key, value in _inside(tree) or ():
        yield from _leaves(f"{name}.{key}" if name else str(key), value)
    if _inside(tree) is None:
        yield name, tree


def _inside(tree: TorchValue) -> list[tuple[Any, Any]] | None:
    """Return the entries of a dict, or of a list that contains tensors or dicts; None for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)) and any(isinstance(x, Tensor) or _inside(x) is not None for x in tree):
        return list(enumerate(tree))
    return None


def _filled(tree: TorchValue, name: str, values: Mapping[str, Any]) -> TorchValue:
    """Return `tree` with the values that were saved; dicts and lists are changed in place."""
    entries = _inside(tree)
    if entries is None:
        return tree if isinstance(tree, Tensor) else values.get(name, tree)
    found = {key: _filled(value, f"{name}.{key}" if name else str(key), values) for key, value in entries}
    if isinstance(tree, tuple):
        return tuple(found.values())
    for key, value in found.items():
        tree[key] = value
    return tree
