"""Inputs of a pipeline's microbatches: pieces of one batch, or separate batches with their own sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.graph import Input, Value

from .._errors import StageError
from ..table.schedule import Schedule
from .step_parts import EPILOGUE, PROLOGUE, RankParts


class MicrobatchInput(NamedTuple):
    """An input of a microbatch.

    `value` is equal to `given`, or, if `is_piece`, to the piece of `given` with the number of the microbatch.
    """

    value: Value
    given: Value
    is_piece: bool


@dataclass(frozen=True)
class MicrobatchInputs:
    """The inputs of a run; for each microbatch, the copy of the model that it goes through, and its feeds."""

    inputs: tuple[Input, ...]
    copies: tuple[int, ...]
    feeds: tuple[tuple[MicrobatchInput, ...], ...]

    @property
    def is_split(self) -> bool:
        """True if the microbatches are pieces of one batch."""
        return any(feed.is_piece for feeds in self.feeds for feed in feeds)


def split_batch(ways: Sequence[RankParts], schedule: Schedule, cut: Collection[int]) -> MicrobatchInputs:
    """Return the intake of one batch. Leaves whose numbers are in `cut` are split along dim 0; other leaves stay whole.

    `ways` are the copies of the model, one for each way of the schedule.

    Raises:
        StageError: the split leaves do not have the same sharding of rows.
    """
    inputs = _inputs(ways)
    _check_rows([i for i in inputs if i.role == "batch" and i.source in cut])
    feeds = tuple(MicrobatchInput(i.value, i.value, True) for i in inputs if i.role == "batch" and i.source in cut)
    copies = tuple(map(schedule.way_of, range(schedule.microbatches)))
    return MicrobatchInputs(inputs, copies, (feeds,) * schedule.microbatches)


def _check_rows(cut: Sequence[Input]) -> None:
    if len({i.spec.layout.dims[0] if i.spec else () for i in cut}) > 1:
        layouts = ", ".join(repr(i.spec) if i.spec else "a plain tensor" for i in cut)
        raise StageError(
            "a batch in microbatches",
            f"rows in the layouts {layouts}",
            "a rank would take other rows of one tensor than of the other for a microbatch",
            "shard the rows of all tensors of a batch along the same axes",
        )


def separate_batches(copies: Sequence[RankParts], copy_of: Sequence[int], leaves: int) -> MicrobatchInputs:
    """Return the intake of separate batches of `leaves` leaves each; batch m goes through copy `copy_of[m]`.

    The numbers of leaves continue from batch to batch.

    Raises:
        StageError: work that is done once for all microbatches depends on a batch.
    """
    _check_once(copies)
    given: list[Input] = []
    feeds: list[tuple[MicrobatchInput, ...]] = []
    for m, n in enumerate(copy_of):
        batch = [i for i in copies[n].inputs if i.role == "batch"]
        own = [replace(i, value=_fresh(i.value, m), source=i.source + m * leaves) for i in batch]
        feeds.append(tuple(MicrobatchInput(i.value, o.value, False) for i, o in zip(batch, own, strict=True)))
        given += own
    shared = (i for i in _inputs(copies) if i.role != "batch")
    return MicrobatchInputs((*shared, *given), tuple(copy_of), tuple(feeds))


def _inputs(copies: Sequence[RankParts]) -> tuple[Input, ...]:
    """Return the inputs that any of the programs gets from outside."""
    found = {i.value: i for parts in copies for i in parts.inputs}
    found |= {i.value: i for i in copies[0].programs[EPILOGUE].inputs if i.role != "saved"}
    return tuple(found.values())


def _fresh(v: Value, m: int) -> Value:
    return Value(f"{v.name}_of_{m}", v.shape, v.dtype, v.device)


def _check_once(copies: Sequence[RankParts]) -> None:
    read = (i for parts in copies for place in (PROLOGUE, EPILOGUE) for i in parts.programs[place].inputs)
    one = next((i for i in read if i.role == "batch"), None)
    if one is not None:
        raise StageError(
            "separate batches as microbatches",
            f"{one.name!r} of the batch is read once for all microbatches",
            "each microbatch has its own value",
            "pass one batch, which is split along its rows: dist_model(*batch)",
        )
