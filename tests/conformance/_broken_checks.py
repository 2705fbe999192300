"""Checks that end in each way, for the workers of the tests."""

from __future__ import annotations

import os
import signal
import time

import torch

from meshwright.comm import current_communicator
from meshwright.conformance import Check, NotRun, Target, WrongResult


def right(target: Target) -> str:
    print("a check may print")
    return f"on {target.device}"


def wrong(target: Target) -> None:
    raise WrongResult("[1] instead of [2]")


def raises(target: Target) -> None:
    raise ZeroDivisionError("no number")


def hangs(target: Target) -> None:
    time.sleep(60)


def dies(target: Target) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def does_not_apply(target: Target) -> None:
    raise NotRun("needs 2 devices, found 1")


def fails_on_rank_1(target: Target) -> None:
    if current_communicator().rank == 1:
        raise WrongResult("other numbers")
    current_communicator().all_reduce(torch.ones(2), "sum", (0, 1))


CHECKS = (
    Check(0, "right", right),
    Check(0, "wrong", wrong),
    Check(0, "raises", raises),
    Check(0, "hangs", hangs, limit=0.5),
    Check(1, "dies", dies),
    Check(1, "does not apply", does_not_apply),
    Check(1, "right after all", right),
    Check(3, "right on two ranks", right, 2),
    Check(3, "fails on rank 1", fails_on_rank_1, 2),
)
