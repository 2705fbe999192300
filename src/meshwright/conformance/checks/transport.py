"""Level 3: collectives and messages between ranks, as values, with uneven and empty parts, and with errors.

The programs run on any even number of ranks: at level 2 on simulated ranks, at level 3 on two and on four processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from meshwright.comm import CommError, current_communicator
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.reshard import plan

from ..results.check import Target
from .comparison import expect, expect_all_equal, expect_close, expect_equal

EVEN, UNEVEN, EMPTY = (2, 2), (1, 3), (0, 2)
"""Rows of the parts of even and of odd ranks."""
_LARGE = (2**14 + 1,)
"""Shape of a tensor that is too large, in every dtype, to travel with the comparison of the call."""
REDUCTIONS: dict[str, Sequence[torch.dtype]] = {
    "sum": (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16),
        torch.complex64,
    ),
    "avg": (torch.float32, torch.bfloat16, torch.float16),
    "prod": (torch.float32, torch.int32),
    "max": (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool),
    "min": (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool),
    "any": (torch.bool, torch.float32),
    "all": (torch.bool,),
}
MOVED = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool),
    torch.complex64,
    torch.float8_e4m3fn,
)
FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "avg": lambda x: (x.float().sum(0) / len(x)).to(x.dtype),
    "prod": lambda x: x.prod(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "any": lambda x: x.any(0).to(x.dtype),
    "all": lambda x: x.all(0).to(x.dtype),
}


def values(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> Tensor:
    """Return small integers on the CPU that depend on the seed only; every order of summation gives the same sum."""
    start = 1 + sum(7**place * part for place, part in enumerate(seed))
    count = torch.Size(shape).numel()
    whole = (torch.arange(start, start + count, device="cpu") * 5 % 4).reshape(tuple(shape))
    return whole.to(torch.bool) if dtype == torch.bool else whole.to(dtype)


def _group() -> tuple[int, ...]:
    """Return all ranks."""
    return tuple(range(current_communicator().size))


def _neighbours() -> tuple[int, int]:
    """Return the ranks before and after this one, which are the same one of two ranks."""
    ranks = current_communicator()
    return (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size


def _rows(pattern: tuple[int, int]) -> list[int]:
    """Return the rows of each rank's part."""
    return [pattern[rank % 2] for rank in _group()]


def _folded(op: str, terms: Sequence[Tensor]) -> Tensor:
    return FOLDS[op](torch.stack(list(terms)))


def reduction(op: str, dtype: torch.dtype, target: Target) -> None:
    """All-reduce and reduce-scatter: one number, even, uneven and empty parts, a transposed tensor, given memory."""
    ranks, d, group = current_communicator(), target.device, _group()
    me = ranks.rank
    for shape in ((3, 2), (), (0, 2), (257,), _LARGE):
        goal = _folded(op, [values(shape, dtype, r) for r in group])
        mine = values(shape, dtype, me).to(d)
        expect_equal(ranks.all_reduce(mine, op, group), goal, f"all-reduce of {list(shape)}")
        expect_equal(mine, values(shape, dtype, me), "the operand of an all-reduce")
        expect_equal(ranks.all_reduce(mine.clone(), op, group, over=True), goal, "all-reduce in given memory")
    mine, out = values((3, 2), dtype, me).to(d), torch.empty(2, 3, dtype=dtype, device=d)
    goal = _folded(op, [values((3, 2), dtype, r) for r in group]).t()
    expect_equal(ranks.all_reduce(mine.t(), op, group), goal, "all-reduce of a transposed tensor")
    expect_equal(ranks.all_reduce(mine.t(), op, group, out=out), goal, "all-reduce into a tensor")
    for size in map(_rows, (EVEN, UNEVEN, EMPTY)):
        pieces = [values((size[to], 3), dtype, me, to).to(d) for to in group]
        goal = _folded(op, [values((size[me], 3), dtype, r, me) for r in group])
        expect_equal(ranks.reduce_scatter(pieces, op, group), goal, f"reduce-scatter of {size} rows")


def gather(dtype: torch.dtype, target: Target) -> None:
    """All-gather of even, uneven and empty parts, for both orders of the group."""
    ranks, d = current_communicator(), target.device
    for group in (_group(), _group()[::-1]):
        for rows in map(_rows, (EVEN, UNEVEN, EMPTY)):
            goal = [values((rows[r], 3), dtype, r) for r in group]
            found = ranks.all_gather(
                values((rows[ranks.rank], 3), dtype, ranks.rank).to(d), group, [x.shape for x in goal]
            )
            expect_all_equal(found, goal, f"all-gather of {rows} rows in the order {group}")
    goal = [values((4, 2), dtype, r).t() for r in _group()]
    found = ranks.all_gather(values((4, 2), dtype, ranks.rank).to(d).t(), _group(), [(2, 4)] * ranks.size)
    expect_all_equal(found, goal, "all-gather of transposed tensors")
    goal = [values(_LARGE, dtype, r) for r in _group()]
    found = ranks.all_gather(values(_LARGE, dtype, ranks.rank).to(d), _group(), [_LARGE] * ranks.size)
    expect_all_equal(found, goal, "all-gather of large tensors")


def swap(dtype: torch.dtype, target: Target) -> None:
    """All-to-all of even, uneven and empty pieces."""
    ranks, d, group = current_communicator(), target.device, _group()
    me = ranks.rank
    for rows in map(_rows, (EVEN, UNEVEN, EMPTY)):
        pieces = [values((rows[to] + me, 2), dtype, me, to).to(d) for to in group]
        goal = [values((rows[me] + r, 2), dtype, r, me) for r in group]
        found = ranks.all_to_all(pieces, [x.shape for x in goal], group)
        expect_all_equal(found, goal, f"all-to-all of {rows} rows")


def message(dtype: torch.dtype, target: Target) -> None:
    """Messages to the next rank and to itself, by tags in another order, of several sizes."""
    ranks, d = current_communicator(), target.device
    me, (before, after) = ranks.rank, _neighbours()
    shapes = [(3, 2), (), (0, 2), (1000,)]
    for tag, shape in enumerate(shapes):
        ranks.send(values(shape, dtype, me, tag).to(d), after, tag)
    for tag, shape in reversed(list(enumerate(shapes))):
        found = ranks.receive(before, tag, shape, dtype, d)
        expect_equal(found, values(shape, dtype, before, tag), f"message with tag {tag}")
        expect(found.device == d, f"a message is on {found.device} instead of {d}")
    ranks.send(values((5,), dtype, me).to(d), me, 9)
    expect_equal(ranks.receive(me, 9, (5,), dtype, d), values((5,), dtype, me), "a message to itself")


def messages_of_one_tag(target: Target) -> None:
    """Messages with one tag arrive in their order, also if the sender writes to the tensor afterwards."""
    ranks, d = current_communicator(), target.device
    (before, after), x = _neighbours(), torch.zeros(64, device=d)
    for at in range(20):
        x.fill_(at)
        ranks.send(x, after, 3)
    for at in range(20):
        found = ranks.receive(before, 3, (64,), torch.float32, d)
        expect_equal(found, torch.full((64,), float(at), device="cpu"), f"message {at}")


def exchange(target: Target) -> None:
    """Several messages of every rank in one call, with an empty one and one to itself."""
    ranks, d, group = current_communicator(), target.device, _group()
    me, (before, after) = ranks.rank, _neighbours()
    parts: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((2,), torch.float32), ((3, 2), torch.int16), ((0,), torch.float32), ((2,), torch.bool)
    ]  # fmt: skip
    sends = [(after, values(s, t, me, n).to(d)) for n, (s, t) in enumerate(parts)]
    receives = [(before, s, t, d) for s, t in parts]
    found = ranks.exchange(
        [*sends, (me, values((5,), torch.int64, me).to(d))], [(me, (5,), torch.int64, d), *receives], group
    )
    goal = [values((5,), torch.int64, me), *(values(s, t, before, n) for n, (s, t) in enumerate(parts))]
    expect_all_equal(found, goal, "exchange")
    one_way = ranks.exchange([(1, sends[0][1])] if me == 0 else [], [(0, *parts[0], d)] if me == 1 else [], group)
    expect_all_equal(one_way, [values((2,), torch.float32, 0, 0)] if me == 1 else [], "a message in one direction")


def large_tensors(target: Target) -> None:
    """Tensors of some megabytes."""
    ranks, d, group = current_communicator(), target.device, _group()
    (before, after), count = _neighbours(), 2**20 + 3
    mine = values((count,), torch.float32, ranks.rank).to(d)
    goal = [values((count,), torch.float32, r) for r in group]
    expect_equal(ranks.all_reduce(mine, "sum", group), _folded("sum", goal), "all-reduce")
    expect_all_equal(ranks.all_gather(mine, group, [(count,)] * ranks.size), goal, "all-gather")
    ranks.send(mine, after, 1)
    expect_equal(ranks.receive(before, 1, (count,), torch.float32, d), goal[before], "message")


def not_a_number(target: Target) -> None:
    """NaN on one rank reaches every rank."""
    ranks, group = current_communicator(), _group()
    places = torch.arange(ranks.size + 1, device="cpu")
    x = torch.where(places == ranks.rank, float("nan"), 1.0).to(target.device)
    goal = places < ranks.size
    for op in ("max", "min", "sum"):
        expect_equal(ranks.all_reduce(x, op, group).isnan(), goal, f"NaN in {op}")
        expect_equal(ranks.reduce_scatter([x] * ranks.size, op, group).isnan(), goal, f"NaN in {op} of pieces")


def many_calls(target: Target) -> None:
    """Hundreds of calls of several kinds keep their order."""
    ranks, d, group = current_communicator(), target.device, _group()
    total = torch.zeros(8, device=d)
    for at in range(150):
        total = ranks.all_reduce(total + ranks.rank + at, "max", group)
        first, *_ = ranks.all_gather(total[:4], group, [(4,)] * ranks.size)
        total = total + first.sum() * 0
        if at % 25 == 0:
            ranks.barrier(group)
    goal = float(sum(range(150)) + 150 * group[-1])
    expect_equal(total, torch.full((8,), goal, device="cpu"), "the result of 150 calls")


def work_after_calls(target: Target) -> None:
    """Operands that are written after a call, and results that are read at once, are right."""
    ranks, d, group = current_communicator(), target.device, _group()
    x = torch.full((2**16,), float(ranks.rank + 1), device=d)
    total = float(sum(group) + ranks.size)
    for at in range(10):
        y = ranks.all_reduce(x, "sum", group)
        x.mul_(2)
        expect_equal((y + 0)[:4], torch.full((4,), total * 2**at, device="cpu"), f"call {at}")


def conversions(target: Target) -> None:
    """Conversions of layouts that start, with a call between them, and are waited for in another order."""
    ranks, d, group = current_communicator(), target.device, _group()
    mesh = ProcessMesh(group, ["dp"])
    whole, cut, pending = (parse_spec(f"f32[{text}", mesh) for text in ("7, 2]", "7@dp, 2]", "7, 2] +dp"))
    mine, part = values((7, 2), torch.float32, ranks.rank), values((7, 2), torch.float32, 5)
    most = -(-7 // ranks.size)
    here = slice(ranks.rank * most, (ranks.rank + 1) * most)
    total = _folded("sum", [values((7, 2), torch.float32, r) for r in group])
    gathered = ranks.start(plan(cut, whole), part[here].to(d))
    reduced = ranks.start(plan(pending, whole), mine.to(d))
    expect_equal(ranks.all_reduce(mine[:1].to(d), "sum", group), total[:1], "a call between")
    scattered = ranks.start(plan(pending, cut), mine.to(d))
    expect_equal(scattered.wait(), total[here], "a sum that is sharded")
    expect_equal(reduced.wait(), total, "a sum")
    expect_equal(gathered.wait(), part, "a gathered tensor")


def averages(target: Target) -> None:
    """Sums and means of fractions are close to those of one device, and equal on all ranks."""
    ranks, group = current_communicator(), _group()
    parts = [torch.linspace(-1, 1, 999, device="cpu").mul(3 + r).sin() for r in group]
    for op in ("sum", "avg"):
        found = ranks.all_reduce(parts[ranks.rank].to(target.device), op, group)
        expect_close(found, _folded(op, parts), op)
        for other in ranks.all_gather(found, group, [(999,)] * ranks.size):
            expect_equal(other, found, f"{op} on another rank")


# ---- errors ----


def _raises(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except CommError:
        return
    expect(False, f"{what} raised no error")


def other_calls(target: Target) -> None:
    """Ranks that make different calls get an error each, and may then go on, if calls are compared before they run."""
    ranks, group = current_communicator(), _group()
    last, x = ranks.rank == group[-1], torch.ones(4, device=target.device)
    with ranks.comparing_first():
        _raises(lambda: ranks.all_reduce(x.to(torch.int32) if last else x, "sum", group), "another dtype")
        _raises(lambda: ranks.all_reduce(x, "max" if last else "sum", group), "another reduction")
        _raises(lambda: ranks.all_reduce(x[1:] if last else x, "sum", group), "another shape")
        _raises(lambda: ranks.barrier(group) if last else ranks.all_reduce(x, "sum", group), "another call")
    _expect_calls_again(target)


def _expect_calls_again(target: Target) -> None:
    ranks = current_communicator()
    goal = torch.full((4,), float(ranks.size), device="cpu")
    found = ranks.all_reduce(torch.ones(4, device=target.device), "sum", _group())
    expect_equal(found, goal, "an all-reduce after the errors")


def invalid_calls(target: Target) -> None:
    """Calls that no group could make are refused before data moves."""
    ranks, group, x = current_communicator(), _group(), torch.ones(4, device=target.device)
    _, after = _neighbours()
    _raises(lambda: ranks.all_reduce(x, "sum", (*group, ranks.size)), "a rank that does not exist")
    _raises(lambda: ranks.all_reduce(x, "sum", (after,)), "a group without the caller")
    _raises(lambda: ranks.all_reduce(x, "median", group), "an unknown reduction")
    _raises(lambda: ranks.all_gather(x, group, [(4,)]), "a missing shape")
    _raises(lambda: ranks.send(x, ranks.size + 5, 0), "an unknown peer")
    _raises(lambda: ranks.receive(ranks.rank, 5, (4,), torch.float32, target.device), "a message that was not sent")
    _expect_calls_again(target)


PROGRAMS: dict[str, Callable[[Target], None]] = {
    "messages of one tag keep their order": messages_of_one_tag,
    "exchange": exchange,
    "large tensors": large_tensors,
    "NaN": not_a_number,
    "order of many calls": many_calls,
    "work before and after calls": work_after_calls,
    "conversions in flight": conversions,
    "averages": averages,
    "different calls of ranks": other_calls,
    "invalid calls": invalid_calls,
}


def programs() -> Iterator[tuple[str, Callable[[Target], None]]]:
    """Yield name and program of every check; a program runs on each rank."""
    for op, dtypes in REDUCTIONS.items():
        for dtype in dtypes:
            yield f"reduction by {op} of {str(dtype).removeprefix('torch.')}", partial(reduction, op, dtype)
    for name, program in (("all-gather", gather), ("all-to-all", swap), ("messages", message)):
        for dtype in MOVED:
            yield f"{name} of {str(dtype).removeprefix('torch.')}", partial(program, dtype)
    yield from PROGRAMS.items()
