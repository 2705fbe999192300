"""Programs that run the same on simulated ranks and on processes; `python _programs.py DIR STORY` is one process.

In the story "three", small calls move their data in frames. In the story "transport", a transport moves all data.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from meshwright.comm import Check, CommCall, CommError, ProcessCommunicator, current_communicator, init_process
from meshwright.comm.process import process_communicator
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.reshard import plan

REDUCTIONS = {
    "sum": [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.complex64],
    "avg": [torch.float32, torch.bfloat16, torch.complex64],
    "prod": [torch.float32, torch.int32, torch.int16, torch.complex64],
    "max": [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
    "min": [torch.float32, torch.float16, torch.int16, torch.bool],
    "any": [torch.bool, torch.float32],
    "all": [torch.bool, torch.int64],
}

Results = dict[str, list[Tensor]]


def values(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> Tensor:
    """Return small integers that depend on the seed only; any order of summation gives the same sum."""
    start = 1 + sum(7**place * part for place, part in enumerate(seed))
    count = torch.Size(shape).numel()
    whole = (torch.arange(start, start + count) * 5 % 4).reshape(shape)
    return whole.to(torch.bool) if dtype == torch.bool else whole.to(dtype)


def reductions() -> Results:
    """Return every reduction in every dtype, of one tensor and of uneven parts, one of them empty."""
    ranks = current_communicator()
    group = tuple(range(ranks.size))
    found: Results = {}
    for op, dtypes in REDUCTIONS.items():
        for dtype in dtypes:
            found[f"{op} {dtype}"] = [
                ranks.all_reduce(values((3, 2), dtype, ranks.rank), op, group),
                ranks.all_reduce(values((), dtype, ranks.rank), op, group),
                ranks.all_reduce(values((3, 2), dtype, ranks.rank), op, group, over=True),
                ranks.all_reduce(values((3, 2), dtype, ranks.rank).t(), op, group, over=True),
                ranks.all_reduce(values((0, 2), dtype, ranks.rank), op, group),
                ranks.reduce_scatter([values((2, 3), dtype, ranks.rank, to) for to in group], op, group),
                ranks.reduce_scatter([values((2, to), dtype, ranks.rank, to) for to in group], op, group),
            ]
    return found


def nans() -> Results:
    """Return max, min and sum of tensors with a NaN on one rank, which reaches every rank."""
    ranks = current_communicator()
    group = tuple(range(ranks.size))
    x = torch.tensor([float("nan"), 1.0, 2.0]).roll(ranks.rank)
    return {
        op: [ranks.all_reduce(x, op, group), ranks.reduce_scatter([x] * len(group), op, group)]
        for op in ("max", "min", "sum")
    }


def movements() -> Results:
    """Return gathers, all-to-alls and exchanges: even, uneven and empty, in several dtypes and group orders."""
    ranks = current_communicator()
    found: Results = {}
    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64, torch.bfloat16):
        for group in (tuple(range(ranks.size)), tuple(reversed(range(ranks.size)))):
            me, name = ranks.rank, f"{dtype} {group}"
            uneven = [(peer, 2) for peer in group]
            found[f"gather {name}"] = [
                *ranks.all_gather(values((2, 3), dtype, me), group, [(2, 3)] * len(group)),
                *ranks.all_gather(values((me, 2), dtype, me), group, uneven),
                *ranks.all_gather(values((4, 2), dtype, me).t(), group, [(2, 4)] * len(group)),
            ]
            found[f"all to all {name}"] = [
                *ranks.all_to_all([values((2,), dtype, me, to) for to in group], [(2,)] * len(group), group),
                *ranks.all_to_all(
                    [values((me, to), dtype, me, to) for to in group], [(peer, me) for peer in group], group
                ),
            ]
    return found


def exchanges() -> Results:
    """Return exchanges with several messages in order, one to oneself, empty ones and idle ranks."""
    ranks = current_communicator()
    group, me, cpu = tuple(range(ranks.size)), ranks.rank, torch.device("cpu")
    following, previous = (me + 1) % ranks.size, (me - 1) % ranks.size
    shapes = [(2,), (3, 2), (0,), (2,)]
    kinds = [torch.float32, torch.int16, torch.float32, torch.bool]
    ring = ranks.exchange(
        [(following, values(s, d, me, n)) for n, (s, d) in enumerate(zip(shapes, kinds, strict=True))]
        + [(me, values((5,), torch.int64, me))],
        [(me, (5,), torch.int64, cpu)] + [(previous, s, d, cpu) for s, d in zip(shapes, kinds, strict=True)],
        group,
    )
    one_way = ranks.exchange(
        [(1, torch.ones(3))] if me == 0 else [], [(0, (3,), torch.float32, cpu)] if me == 1 else [], group
    )
    return {"ring": ring, "one way": one_way}


def pairs() -> Results:
    """Return results in groups that each rank first uses in another order."""
    ranks = current_communicator()
    found: Results = {}
    for pair in [(0, 1), (1, 2), (2, 0), (1, 0), (0, 1, 2), (0, 2)]:
        if ranks.rank in pair:
            found[str(pair)] = [ranks.all_reduce(values((4,), torch.float32, ranks.rank), "sum", pair)]
    ranks.barrier((0, 1, 2))
    return found


def calls() -> list[CommCall]:
    """Return the communicator's record of one exchange and one all-reduce."""
    ranks = current_communicator()
    with ranks.seen.record_calls() as log:
        exchanges()
        ranks.all_reduce(torch.ones(3), "sum", (0, 1, 2))
    return log


def started_conversions() -> Results:
    """Return conversions that start, with calls between them, and are waited for in another order."""
    communicator = current_communicator()
    mesh = ProcessMesh(range(communicator.size), ["dp"])
    whole, cut, pending = (parse_spec(f"f32[{spec}", mesh) for spec in ("6, 2]", "6@dp, 2]", "6, 2] +dp"))
    mine = values((6, 2), torch.float32, communicator.rank)
    gathered = communicator.start(
        plan(cut, whole), values(cut.local_shape(communicator.rank), torch.float32, communicator.rank)
    )
    reduced = communicator.start(plan(pending, whole), mine)
    between = communicator.all_reduce(mine[:1], "max", tuple(range(communicator.size)))
    scattered = communicator.start(plan(pending, cut), mine)
    return {
        "scattered": [scattered.wait(), scattered.wait()],
        "gathered": [gathered.wait(), reduced.wait()],
        "between": [between],
    }


RIGHT: list[Callable[[], Results]] = [reductions, nans, movements, exchanges, pairs, started_conversions]


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that `call` raises."""
    try:
        call()
    except CommError as error:
        return str(error)
    return "no error"


def disagreements() -> dict[str, str]:
    """Return the errors of ranks 0 and 1 if their calls differ."""
    ranks = current_communicator()
    me, pair, x = ranks.rank, (0, 1), torch.ones(4)
    if me not in pair:
        return {}
    told = {
        "dtype": error_of(lambda: ranks.all_reduce(x.double() if me else x, "sum", pair)),
        "op": error_of(lambda: ranks.all_reduce(x, "max" if me else "sum", pair)),
        "shape": error_of(lambda: ranks.all_reduce(x[me:], "sum", pair)),
        "kind": error_of(lambda: ranks.barrier(pair) if me else ranks.all_reduce(x, "sum", pair)),
        "pieces": error_of(lambda: ranks.all_to_all([x, x] if me else [x, x[1:]], [(4,), (4,)], pair)),
        "message": error_of(
            lambda: ranks.exchange([] if me else [(1, x)], [(0, (3,), torch.float32, x.device)] if me else [], pair)
        ),
    }
    told["after"] = str(ranks.all_reduce(x, "sum", pair).tolist())
    assert isinstance(ranks, ProcessCommunicator)
    with ranks.checking(3):  # the first call on this group was in `pairs`; the third is compared
        ranks.all_reduce(x, "prod" if me else "sum", (1, 0))
        told["sampled"] = error_of(lambda: ranks.all_reduce(x, "sum", (1, 0)))
    return told | {"group": error_of(lambda: ranks.barrier((1, 0) if me else pair))}


def calls_after_a_different_call() -> list[str]:
    """Return the errors of three ranks, of which one calls something else, and the result of a call of all ranks."""
    ranks = current_communicator()
    group, x, told = (0, 1, 2), torch.ones(2), list[str]()
    for other in group:
        op = "max" if ranks.rank == other else "sum"
        told += [error_of(lambda op=op: ranks.all_reduce(x, op, group)).partition(":")[0]]
        told += [str(ranks.all_reduce(x, "sum", group).tolist())]
    return told


def warnings_of_a_slow_rank() -> list[str]:
    """Return the warnings of a rank that waits for a slow one."""
    ranks = current_communicator()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if ranks.rank == 1:
            time.sleep(2.5)
        ranks.barrier((0, 1, 2))
    return [str(warning.message) for warning in heard]


def order_of_ends() -> list[str]:
    """Return the order in which background work, and a call of this rank that it has made before, end."""
    ranks = current_communicator()
    assert isinstance(ranks, ProcessCommunicator)
    x, ends = torch.ones(5), list[str]()
    ranks.all_reduce(x, "sum", (0, 1, 2))

    def work() -> Tensor:
        time.sleep(0.2)
        ends.append("work")
        return x

    ranks._side.begin(work)
    ranks.all_reduce(x, "sum", (0, 1, 2))
    return [*ends, "call"]


def deadlock() -> str:
    """Return the error of each rank if all wait in a ring."""
    pair = {0: (0, 1), 1: (1, 2), 2: (0, 2)}[current_communicator().rank]
    return error_of(lambda: current_communicator().barrier(pair))


def wait_for_all(directory: Path) -> None:
    """Return as soon as all three processes have called this, without a collective."""
    (directory / f"{current_communicator().rank}.here").touch()
    end = time.monotonic() + 30
    while len(list(directory.glob("*.here"))) < 3 and time.monotonic() < end:
        time.sleep(0.02)


def story_of_three(directory: Path) -> dict[str, object]:
    """Return the results of three processes: all right programs, then all wrong ones."""
    first = calls_after_a_different_call()  # before there is a link to every other rank
    results = {program.__name__: program() for program in RIGHT}
    errors = {
        "after a different call": first,
        "disagreements": disagreements(),
        "late": warnings_of_a_slow_rank(),
        "calls": [str(call) for call in calls()],
        "ends": order_of_ends(),
    }
    last = deadlock()
    wait_for_all(directory)
    return {"right": results, **errors, "deadlock": last}


def story_of_loss(directory: Path) -> dict[str, object]:
    """Return the errors of rank 0 after rank 2 ends early and rank 1 is killed."""
    ranks = current_communicator()
    if ranks.rank == 2:
        return {}
    if ranks.rank == 1:
        ranks.barrier((0, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    told = {"ended": error_of(lambda: ranks.barrier((0, 2)))}
    ranks.barrier((0, 1))
    told["killed"] = error_of(lambda: ranks.barrier((0, 1)))
    torch.save(told, directory / "0.pt")
    raise SystemExit(5)


def main() -> None:
    """Run one process of a story; save its results under its rank."""
    directory, story = Path(sys.argv[1]), sys.argv[2]
    limit = 20.0 if story == "loss" and os.environ["RANK"] == "1" else 0.5
    communicator = init_process(check=Check(every=1, limit=limit))
    assert isinstance(communicator, ProcessCommunicator)
    assert init_process() is communicator  # as a script does although `meshwright run` has done it
    if story == "transport":
        process_communicator.is_small = lambda call: False
    found = story_of_loss(directory) if story == "loss" else story_of_three(directory)
    torch.save(found, directory / f"{communicator.rank}.pt")


if __name__ == "__main__":
    main()
