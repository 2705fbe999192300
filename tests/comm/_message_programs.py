"""Programs with messages that run the same on simulated ranks and on processes; `python … DIR` is one process of three.

Rank 2 never sends to rank 1, so rank 1 has no connection to rank 2 whose end it could notice.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Check, CommError, ProcessCommunicator, current_communicator, init_process

Results = dict[str, list[Tensor]]

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(3, 2), (), (0, 4), (1,)]
MANY = 200
LARGE = 2**20


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers that depend on the seed only."""
    numbers = (torch.arange(torch.Size(shape).numel()) + seed) % 7
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype).reshape(shape)


def kinds() -> Results:
    """Send every dtype and shape from rank 0 to the others, which receive them in the opposite order."""
    ranks = current_communicator()
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    if ranks.rank == 0:
        for peer in (1, 2):
            for tag, (dtype, shape) in enumerate(cases):
                ranks.send(values(shape, dtype, tag), peer, tag)
        return {}
    numbered = reversed(list(enumerate(cases)))
    return {"received": [ranks.receive(0, tag, shape, dtype, "cpu") for tag, (dtype, shape) in numbered]}


def forms() -> Results:
    """Send operands that are not contiguous, are lazy, have a history, or are written to afterwards."""
    ranks = current_communicator()
    if ranks.rank == 0:
        x = values((4, 3), torch.float32, 1)
        ranks.send(x.t(), 1, 0)
        ranks.send(x[::2, 1:], 1, 1)
        ranks.send(values((3,), torch.complex64, 2).mul(1j).conj(), 1, 2)
        ranks.send(x.clone().requires_grad_() * 2, 1, 3)
        ranks.send(x, 1, 4)
        x.zero_()
        return {}
    if ranks.rank == 2:
        return {}
    shapes = [((3, 4), torch.float32), ((2, 2), torch.float32), ((3,), torch.complex64)] + [((4, 3), torch.float32)] * 2
    return {"received": [ranks.receive(0, tag, shape, dtype, "cpu") for tag, (shape, dtype) in enumerate(shapes)]}


def crossed() -> Results:
    """Send much between two ranks before either receives anything, and receive it in another order."""
    ranks = current_communicator()
    if ranks.rank == 2:
        return {}
    peer = 1 - ranks.rank
    for number in range(MANY):
        ranks.send(torch.full((number % 5,), float(number)), peer, number)
    for number in range(4):
        ranks.send(torch.full((LARGE,), float(number)), peer, MANY + number)
    large = [ranks.receive(peer, MANY + n, (LARGE,), torch.float32, "cpu") for n in (2, 0, 3, 1)]
    order = [(n * 7) % MANY for n in range(MANY)]
    small = [ranks.receive(peer, n, (n % 5,), torch.float32, "cpu") for n in order]
    return {"large": [x[:: LARGE // 4] for x in large], "small": small}


def same_tag() -> Results:
    """Send several messages with one tag, to another rank and to oneself; they arrive in order."""
    ranks = current_communicator()
    targets = {0: (0, 1, 2), 1: (1, 2), 2: (0, 2)}
    for peer in targets[ranks.rank]:
        for number in range(3):
            ranks.send(torch.tensor([ranks.rank, peer, number]), peer, 9)
    sources = [peer for peer in reversed(range(3)) if ranks.rank in targets[peer]]
    return {str(peer): [ranks.receive(peer, 9, (3,), torch.int64, "cpu") for _ in range(3)] for peer in sources}


def ring() -> Results:
    """Send messages round a ring, with collectives between them."""
    ranks = current_communicator()
    following, previous = (ranks.rank + 1) % 3, (ranks.rank - 1) % 3
    x = torch.tensor([float(ranks.rank)])
    for step in range(4):
        ranks.send(x, following, 2**31 - 1)
        if step == 2:
            ranks.all_reduce(x, "sum", (0, 1, 2))
        x = x + ranks.receive(previous, 2**31 - 1, (1,), torch.float32, "cpu")
    return {"sum": [x]}


RIGHT: list[Callable[[], Results]] = [kinds, forms, crossed, same_tag, ring]


def counts() -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Return the communicator's records of two programs."""
    ranks = current_communicator()
    calls, received = dict(ranks.seen.calls), dict(ranks.seen.received)
    with ranks.seen.record_calls() as log:
        same_tag()
        ring()
    return (
        [str(call) for call in log],
        {kind: count - calls.get(kind, 0) for kind, count in ranks.seen.calls.items()},
        {kind: count - received.get(kind, 0) for kind, count in ranks.seen.received.items()},
    )


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that `call` raises."""
    try:
        call()
    except CommError as error:
        return str(error)
    return "no error"


def wait_for_all(directory: Path, name: str) -> None:
    """Return as soon as all three processes have called this, without a collective."""
    (directory / f"{current_communicator().rank}.{name}").touch()
    end = time.monotonic() + 30
    while len(list(directory.glob(f"*.{name}"))) < 3 and time.monotonic() < end:
        time.sleep(0.02)


def warnings_of(call: Callable[[], object]) -> list[str]:
    """Return the warnings while `call` runs."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in heard]


def wrong(communicator: ProcessCommunicator, directory: Path) -> dict[str, Any]:
    """Return the errors of ranks 0 and 1; rank 2 is idle."""
    me, told = communicator.rank, {}
    if me == 0:
        communicator.send(torch.ones(2, 3), 1, 5)
        communicator.send(torch.ones(2, 3), 1, 6)
        time.sleep(3.0)
        communicator.send(torch.ones(1), 1, 7)
    if me == 1:
        told["shape"] = error_of(lambda: communicator.receive(0, 5, (3, 2), torch.float32, "cpu"))
        told["dtype"] = error_of(lambda: communicator.receive(0, 6, (2, 3), torch.int32, "cpu"))
        told["late"] = warnings_of(lambda: communicator.receive(0, 7, (1,), torch.float32, "cpu"))
    wait_for_all(directory, "late")
    if me < 2:
        communicator.send(torch.ones(1), 1 - me, 11)
        told["deadlock"] = error_of(lambda: communicator.receive(1 - me, 12, (1,), torch.float32, "cpu"))
    wait_for_all(directory, "deadlock")
    if me == 0:
        limit, communicator._limit = communicator._limit, timedelta(seconds=1)
        told["limit"] = error_of(lambda: communicator.receive(2, 13, (1,), torch.float32, "cpu"))
        communicator._limit = limit
    wait_for_all(directory, "limit")
    return told


def errors_after_losses(communicator: ProcessCommunicator) -> dict[str, Any]:
    """End rank 2, then kill rank 1; return the errors of waiting ranks, which come soon at any limit."""
    began = time.monotonic()
    peer = 2 if communicator.rank == 1 else 1
    with communicator.checking(Check(limit=60.0)):
        told = error_of(lambda: communicator.receive(peer, 14, (1,), torch.float32, "cpu"))
    return {"lost": told, "seconds": time.monotonic() - began}


def main() -> None:
    """Run one process; save its results under its rank."""
    directory = Path(sys.argv[1])
    communicator = init_process(check=Check(every=1, limit=0.5))
    found: dict[str, Any] = {program.__name__: program() for program in RIGHT}
    found["counts"] = counts()
    found |= wrong(communicator, directory)
    if communicator.rank == 2:
        communicator.send(torch.full((LARGE,), 2.0), 0, 15)
    else:
        found |= errors_after_losses(communicator)
    if communicator.rank == 0:
        found["last words"] = communicator.receive(2, 15, (LARGE,), torch.float32, "cpu").sum().item()
        found["after the end"] = error_of(lambda: communicator.receive(2, 16, (1,), torch.float32, "cpu"))
    torch.save(found, directory / f"{communicator.rank}.pt")
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
