"""`python _comparison_program.py FOLDER STORY WAY`: one of two ranks that repeat a step without shared memory.

Data moves over Gloo for the way "gloo", however small it is, and in frames for "frames".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import Check, CommError, Communicator, ProcessCommunicator, call_purpose, init_process
from meshwright.comm.checking.call_guard import Guard
from meshwright.comm.process import process_communicator

STEPS = 12
PAIR = (0, 1)


def step(here: Communicator, number: int = 0) -> list[Any]:
    """Return the results of the calls of one step; the calls of each step have purposes of their own."""
    call_purpose.what = number, f"step {number}"
    x = torch.arange(4.0) + here.rank
    found = [here.all_reduce(x, "sum", PAIR), here.all_reduce(x[:2], "sum", PAIR), here.all_reduce(x, "sum", PAIR)]
    gathered = here.all_gather(x[: 1 + here.rank], PAIR, [(1,), (2,)])
    found += [torch.cat(gathered), here.reduce_scatter([x[:2], x[2:]], "sum", PAIR)]
    found += here.all_to_all([x[:1], x[1:]], [(1,) if here.rank == 0 else (3,)] * 2, PAIR)
    here.barrier(PAIR)
    call_purpose.what = 0, ""
    return [each.tolist() for each in found]


def warm(here: ProcessCommunicator) -> list[Any]:
    """Repeat the step until its calls are predicted; return the results of the last step."""
    found: list[Any] = []
    for number in range(STEPS):
        found = step(here, number)
    return found


def error_of(call: Callable[[], object]) -> str:
    """Return the class and the text of the error of a call; the results of the call if there is none."""
    try:
        return f"no error: {call()}"
    except CommError as error:
        return f"{type(error).__name__}: {error}"


def story_of_agreement(here: ProcessCommunicator) -> dict[str, Any]:
    """Return the kinds of the calls that are compared first in the last step, and what follows other values."""
    firsts: list[str] = []
    begin, results = Guard.before, warm(here)

    def noted(self: Guard, call: Any, lags: bool = False) -> None:
        begin(self, call, lags)
        if not self.is_behind:
            firsts.append(call.kind)

    Guard.before = noted  # pyright: ignore[reportAttributeAccessIssue] - the same signature
    step(here, STEPS)
    compared_first = list(firsts)

    def for_other_values() -> object:
        call_purpose.what = here.rank, "a tensor"
        return here.all_reduce(torch.ones(4), "sum", PAIR)

    told = error_of(for_other_values)
    found = {"results": results, "first": compared_first, "other values": told, "after": step(here, STEPS + 1)}
    return found | {"flags": flags(here), "other": error_of(lambda: flag_or_sum(here)), "flags after": flags(here)}


def flags(here: Communicator) -> list[bool]:
    """Return the answers for flags of no rank, of one rank and of both."""
    return [here.any_true(flag, PAIR) for flag in (False, here.rank == 1, True, here.rank == 0, False)]


def flag_or_sum(here: Communicator) -> object:
    """Exchange flags on rank 0, and sums on rank 1."""
    return here.any_true(True, PAIR) if here.rank == 0 else here.all_reduce(torch.ones(1), "sum", PAIR)


def story_of_slowness(here: ProcessCommunicator) -> list[int]:
    """Return the ranks that a rank reports as slow; rank 1 is slow in every call that is compared behind."""
    for number in range(100):
        if here.rank == 1 and number >= 30:
            time.sleep(0.05)
        here.all_reduce(torch.ones(4), "sum", PAIR)
    found = [each.rank for each in here.stragglers()]
    here.barrier(PAIR)
    return found


def story_of_repeated_mistakes(here: ProcessCommunicator) -> list[str]:
    """Return the errors of different calls that follow the same calls several times."""
    told: list[str] = []
    for _ in range(4):
        for size in range(5, 30):
            here.all_reduce(torch.ones(size), "sum", PAIR)
        x, op = (torch.ones(4), "max") if here.rank == 0 else (torch.ones(2), "sum")
        told.append(error_of(lambda x=x, op=op: here.all_reduce(x, op, PAIR)))
    return told


STORIES: dict[str, Callable[[ProcessCommunicator], object]] = {
    "agreement": story_of_agreement,
    "slowness": story_of_slowness,
    "repeated mistakes": story_of_repeated_mistakes,
}


def other_call(here: ProcessCommunicator) -> object:
    """Make another call than rank 0, which repeats the step."""
    return step(here, STEPS) if here.rank == 0 else here.all_reduce(torch.arange(4.0), "max", PAIR)


def other_order(here: ProcessCommunicator) -> object:
    """Make the second call of the step before the first one."""
    return step(here, STEPS) if here.rank == 0 else here.all_reduce(torch.arange(2.0), "sum", PAIR)


def ended(here: ProcessCommunicator) -> object:
    """End before a step that rank 0 repeats."""
    return step(here, STEPS) if here.rank == 0 else None


def killed(here: ProcessCommunicator) -> object:
    """Die before a step that rank 0 repeats."""
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(here, STEPS)


def lives_on(here: ProcessCommunicator) -> object:
    """Make another call than rank 0, and go on without it."""
    if here.rank == 0:
        return step(here, STEPS)
    told = error_of(lambda: other_call(here))
    time.sleep(3.5)
    return told


FAULTS: tuple[Callable[[ProcessCommunicator], object], ...] = (other_call, other_order, ended, killed, lives_on)


def main() -> None:
    folder, story, way = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if way == "gloo":
        process_communicator.is_small = lambda call: False
    here = init_process(check=Check(limit=1.0))
    assert isinstance(here, ProcessCommunicator)
    if story in STORIES:
        (folder / f"{here.rank}.json").write_text(json.dumps(STORIES[story](here)))
        return
    warm(here)
    fault = next(each for each in FAULTS if each.__name__ == story)
    print(f"rank {here.rank}: {error_of(lambda: fault(here))}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
