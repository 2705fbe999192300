"""`python _small_calls_program.py FOLDER`: one of four ranks that make random small calls, each in two ways.

The data of a call moves in the frames that compare it, and then by the transport of the group.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm import Communicator, init_process
from meshwright.comm.communicators.reductions import REDUCTIONS
from meshwright.comm.process import process_communicator

RANKS, CASES = 4, 240
GROUPS = [(0, 1), (2, 3), (3, 1, 0), (2, 1), (0, 1, 2, 3)]
SHAPES = [(), (1,), (0,), (5,), (2, 3), (7, 0), (3, 1, 4), (257,)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.complex64]
SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 65504.0, 1e-40]


class Case(NamedTuple):
    """One random call, which is the same on all ranks of its group; `op` is "" for a gather."""

    number: int
    group: tuple[int, ...]
    op: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    """The shape of the tensor of each rank of the group."""
    form: str
    """One of plain, transposed, over, out."""


def cases() -> list[Case]:
    """Return the calls of all ranks, in the order in which they are made."""
    return [_case(number, random.Random(number)) for number in range(CASES)]


def _case(number: int, draw: random.Random) -> Case:
    group, dtype, shape = draw.choice(GROUPS), draw.choice(DTYPES), draw.choice(SHAPES)
    allowed = [op for op, reduction in REDUCTIONS.items() if not reduction.refuses(dtype)]
    op = draw.choice([*allowed, ""])
    form = draw.choice(["plain", "transposed", "over", "out"])
    shapes = [shape] * len(group)
    if not op and draw.random() < 0.5:
        shapes = [draw.choice(SHAPES) for _ in group]
    return Case(number, group, op, dtype, tuple(shapes), form)


def operand(case: Case, place: int) -> Tensor:
    """Return the tensor of the rank at this place of the group."""
    generator = torch.Generator().manual_seed(100 * case.number + place)
    shape = case.shapes[place]
    if case.form == "transposed":
        shape = tuple(reversed(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 40
    flat = values.view(-1)
    for at in range(0, flat.numel(), 3):
        if case.dtype.is_floating_point and torch.rand((), generator=generator) < 0.3:
            flat[at] = SPECIAL[int(torch.randint(len(SPECIAL), (), generator=generator))]
    if case.dtype.is_complex:
        values = torch.complex(values, values.flip(0) if values.dim() else -values)
    x = (values > 0) if case.dtype == torch.bool else values.abs().to(case.dtype)
    if not (case.dtype.is_complex or case.dtype in (torch.bool, torch.uint8)):
        x = values.to(case.dtype)
    if case.form != "transposed":
        return x
    return x.permute(tuple(reversed(range(x.dim())))).conj()


def results(here: Communicator, case: Case) -> list[Tensor]:
    """Return the results of a call of this rank."""
    place = case.group.index(here.rank)
    x = operand(case, place)
    given, out = x.clone(), [torch.ones(shape, dtype=case.dtype) for shape in case.shapes]
    if not case.op:
        into = out if case.form == "out" else None
        found: Sequence[Tensor] = here.all_gather(x, case.group, case.shapes, out=into)
    else:
        into_one = out[0] if case.form == "out" else None
        found = [here.all_reduce(x, case.op, case.group, over=case.form == "over", out=into_one)]
        assert into_one is None or found[0] is into_one
    assert case.form == "over" or torch.equal(x.nan_to_num(), given.nan_to_num())
    assert all(each.is_contiguous() for each in found)
    return [each.clone() for each in found]


def both(here: Communicator, case: Case) -> list[list[Tensor]]:
    """Return the results of a call in frames, and by the transport of its group."""
    found, is_small = [results(here, case)], process_communicator.is_small
    process_communicator.is_small = lambda call: False
    try:
        return [*found, results(here, case)]
    finally:
        process_communicator.is_small = is_small


def main() -> None:
    """Run one rank, and save its results by the numbers of the cases."""
    torch.set_num_threads(1)
    here = init_process()
    found = {case.number: both(here, case) for case in cases() if here.rank in case.group}
    here.barrier(tuple(range(RANKS)))
    torch.save(found, Path(sys.argv[1]) / f"{here.rank}.pt")


if __name__ == "__main__":
    main()
