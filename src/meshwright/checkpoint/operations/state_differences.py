"""The differences between a state and a checkpoint, found for all names at once, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from typing import Any

import torch

from .._errors import CheckpointError
from ..contents.catalogue import Catalogue
from ..contents.rank_world import World
from ..formats.saved_state import HeldTensor, check_whole

MOST_LINES = 200
"""Most lines of a message for each kind of mismatch."""
MOST_RENAMED = 100
"""Most names for which a similar one is searched."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The part of a state that was not loaded.

    `missing_keys` were not saved, `unexpected_keys` were saved but are not in the state, both as in
    `torch.nn.Module.load_state_dict`. `mismatched` maps names to the difference.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def left_out(self) -> frozenset[str]:
        """Return the names of the state that keep their values."""
        return frozenset((*self.missing_keys, *self.mismatched))


@dataclass(frozen=True, slots=True)
class StateComparison:
    """The differences, the shapes of missing tensors (None for a value), and the first rank with a difference."""

    report: LoadReport
    shapes: Mapping[str, Sequence[int] | None]
    rank: int | None


def compare_state(
    catalogue: Catalogue,
    tensors: Mapping[str, HeldTensor],
    values: Iterable[str],
    ranks: World,
    others: Mapping[str, str],
    expected: Callable[[str], bool] = lambda name: True,
) -> StateComparison:
    """Return the differences on all ranks.

    `expected` selects the names of the checkpoint that the state should have. Every rank makes the call.
    """
    _, everyone = ranks.agreed(lambda: _differences(catalogue, tensors, values, others))
    missing, mismatched = (_of_all_ranks(everyone, kind) for kind in ("missing", "mismatched"))
    mine = json.dumps(sorted({*tensors, *values}))
    asked = ranks.all_gather_distinct(mine, sha256(mine.encode()).hexdigest())
    names = {name for text in asked for name in json.loads(text)}
    saved = [*catalogue.entries, *catalogue.values]
    unexpected = [name for name in saved if name not in names and expected(name)]
    where = next((rank for rank, one in enumerate(everyone) if one["missing"] or one["mismatched"]), None)
    return StateComparison(LoadReport(tuple(missing), tuple(unexpected), mismatched), missing, where)


def _of_all_ranks(everyone: Sequence[Mapping[str, Mapping[str, Any]]], kind: str) -> dict[str, Any]:
    """Return the differences of one kind of all ranks; the last rank with a name decides."""
    return {name: told for one in everyone for name, told in one[kind].items()}


def _differences(
    catalogue: Catalogue, tensors: Mapping[str, HeldTensor], values: Iterable[str], others: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the differences on this rank. Raises CheckpointError for a tensor with a pending reduction."""
    missing: dict[str, list[int] | None] = {}
    mismatched = dict(others)
    for name, held in tensors.items():
        if held.spec is not None:
            check_whole(name, held.spec, "to load")
        if name in catalogue.entries:
            if told := difference_of(catalogue, name, held):
                mismatched[name] = told
        elif name in catalogue.values:
            mismatched[name] = "a value in the checkpoint, a tensor in the state"
        else:
            missing[name] = list(_shape(held))
    for name in values:
        if name in catalogue.entries:
            mismatched[name] = "a tensor of that name in the checkpoint, a value in the state"
        elif name not in catalogue.values:
            missing[name] = None
    return {"missing": missing, "mismatched": mismatched}


def difference_of(catalogue: Catalogue, name: str, held: HeldTensor) -> str:
    """Return the difference of a tensor from the saved one as text; "" if there is none."""
    shape, dtype = _shape(held), held.part.dtype if held.spec is None else held.spec.dtype
    entry = catalogue.entries[name]
    if shape == entry.shape and widens(entry.dtype, dtype):
        return ""
    return f"{entry.dtype} of shape {entry.shape} in the checkpoint, {dtype} of shape {shape} in the state"


def _shape(held: HeldTensor) -> tuple[int, ...]:
    return tuple(held.part.shape if held.spec is None else held.spec.shape)


def widens(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """True if a dtype holds every number of another dtype of its kind.

    Numbers of 8 bits are not widened: they are codes, whose scales are other tensors.

    >>> widens(torch.bfloat16, torch.float32), widens(torch.float32, torch.bfloat16)
    (True, False)
    """
    if saved is wanted:
        return True
    if saved.itemsize == 1:
        return False
    floats = saved.is_floating_point and wanted.is_floating_point
    alike = floats or (saved.is_complex and wanted.is_complex)
    return alike and saved.itemsize < wanted.itemsize and torch.promote_types(saved, wanted) is wanted


def mismatch_error(catalogue: Catalogue, found: StateComparison, *, in_part: bool = True) -> CheckpointError:
    """Return the error that lists all differences; with `in_part`, it says how to load a part."""
    report = found.report
    kinds = {"missing": report.missing_keys, "mismatched": report.mismatched, "unexpected": report.unexpected_keys}
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
    lines = [
        *_lines(report.missing_keys, lambda name: _missing_text(catalogue, found, name)),
        *_lines(report.mismatched, lambda name: report.mismatched[name]),
        *_lines(report.unexpected_keys, lambda name: "in the checkpoint, not in the state"),
    ]
    first = next(iter(report.left_out), None) if len(report.left_out) == 1 else None
    return CheckpointError(
        f"to load {first or 'a state'} from {catalogue.folder}",
        "\n    ".join([counts, *lines]),
        "a state is loaded whole or not at all; nothing was loaded",
        "use a tensor of the saved name and shape, in its dtype or one that holds all its numbers"
        + ("; or pass strict=False, which loads what fits and returns the rest" if in_part else ""),
    )


def _lines(names: Iterable[str], text: Callable[[str], str]) -> list[str]:
    chosen = list(names)
    lines = [f"{_on_one_line(name)}: {text(name)}" for name in chosen[:MOST_LINES]]
    return [*lines, f"and {len(chosen) - MOST_LINES} more"] if len(chosen) > MOST_LINES else lines


def _on_one_line(name: str) -> str:
    return name.replace("\n", r"\n")


def _missing_text(catalogue: Catalogue, found: StateComparison, name: str) -> str:
    """Return the text for a missing name, with a name of the same shape under which it may have been saved."""
    shape, report = found.shapes[name], found.report
    if shape is None:
        return f"no such value among {len(catalogue.values)}"
    told = f"no such tensor among {len(catalogue.entries)}"
    if report.missing_keys.index(name) >= MOST_RENAMED:
        return told
    saved = (n for n in report.unexpected_keys if n in catalogue.entries)
    alike = [n for n in saved if catalogue.entries[n].shape == tuple(shape)]
    near = get_close_matches(name, alike[: 10 * MOST_RENAMED], 1, 0.3)
    return f"{told}; {_on_one_line(near[0])} has the same shape: renamed?" if near else told
