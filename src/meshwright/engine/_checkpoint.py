"""States saved and loaded: nested dicts of tensors, distributed or not, and of Python values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint import (
    CheckpointError,
    Held,
    LoadReport,
    Saving,
    format_of,
    latest,
    load,
    open_together,
    save,
)
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
    """Write a state as a checkpoint, the new folder `path`; every rank calls it with what it holds.

    `state` is a nested dict of tensors and Python values; a plain tensor counts as repeated on the ranks that have it.
    The folder appears complete, or not at all. With `async_save` the tensors are copied, threads write them, and
    `wait()` of the returned Saving tells when it is done or what went wrong. A failure that nobody waited for is told
    by a CheckpointWarning at the next save, which is made, or at the end of the program. With `keep`, only so many
    folders `step_…` are left beside it. `format` is "meshwright", "safetensors" or "dcp".

    Raises CheckpointError, on every rank, for what cannot be saved; FolderInUseError for a folder of steps into which
    another job saves.
    """
    tensors, values = _held(state)
    saving = save(path, tensors, values, format_of(format), async_save, keep)
    if not async_save:
        saving.wait()
    return saving


def load_state_dict(state: MutableMapping[str, Any], path: Where, *, strict: bool = True) -> LoadReport:
    """Fill a state in place from a checkpoint of any mesh, layout or format; every rank calls it with what it holds.

    Each rank reads the slices that it holds. Values that are no tensors are put in the place of those in `state`. Of a
    folder of steps, the latest complete one is read. Names of `state` must have been saved, in their shapes and dtypes;
    an error lists all that are not. With `strict=False` what fits is loaded, and the rest stays as it was. The report
    has `missing_keys`, `unexpected_keys` (saved, but not in `state`) and `mismatched` (name → what differs).

    Raises CheckpointError before the first tensor is written; ReadTimeoutError for a file system that does not answer.
    """
    catalogue = open_together(path)
    tensors, values = _held(state)
    report = load(catalogue, tensors, values, strict=strict)
    kept = {name: value for name, value in catalogue.values.items() if name not in report.mismatched}
    _filled(state, "", kept)
    return report


def latest_checkpoint(folder: Where) -> Path | None:
    """Return the latest complete checkpoint among the folders `step_…` in `folder`, or None."""
    return latest(folder)


def held(x: Tensor) -> Held:
    """A tensor as this rank holds it; the part shares its memory."""
    return Held(x.to_local().detach(), x.spec) if isinstance(x, DistTensor) else Held(x.detach())


def _held(state: Any) -> tuple[dict[str, Held], dict[str, Any]]:
    """The tensors and the values of a state, by name."""
    tensors: dict[str, Held] = {}
    values: dict[str, Any] = {}
    for name, leaf in _leaves("", state):
        if name in tensors or name in values:
            raise CheckpointError(
                f"a state with {name}", "two leaves of that name", "names are keys, joined by dots",
                "keys that differ when they are joined",
            )  # fmt: skip
        if isinstance(leaf, Tensor):
            tensors[name] = held(leaf)
        else:
            values[name] = leaf
    return tensors, values


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    for key, value in _inside(tree) or ():
        yield from _leaves(f"{name}.{key}" if name else str(key), value)
    if _inside(tree) is None:
        yield name, tree


def _inside(tree: Any) -> list[tuple[Any, Any]] | None:
    """The entries of a dict, or of a list with tensors or dicts in it; None for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)) and any(isinstance(x, Tensor) or _inside(x) is not None for x in tree):
        return list(enumerate(tree))
    return None


def _filled(tree: Any, name: str, values: Mapping[str, Any]) -> Any:
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
