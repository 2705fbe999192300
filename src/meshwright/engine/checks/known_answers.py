"""Sums and products with known results, which show whether a fault persists."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.comm import Group, current_communicator

_SIZE, _TIMES = 64, 8


def diagnosis(group: Group) -> str:
    """Test known sums between ranks and products on each; return in words whether the fault persists.

    Every rank makes the call.
    """
    wrong = {name: _wrong_ranks(test, group) for name, test in _TESTS.items()}
    told = [f"{name} are wrong on rank {', '.join(map(str, ranks))}" for name, ranks in wrong.items() if ranks]
    if not told:
        return f"{' and '.join(_TESTS)} are right now, so the fault was transient, or in memory"
    return f"{' and '.join(told)}: the fault persists"


def _sum_is_right(group: Group) -> bool:
    here = current_communicator()
    mine = torch.arange(_SIZE, dtype=torch.float32, device="cpu") + here.rank
    right = torch.arange(_SIZE, dtype=torch.float32, device="cpu") * len(group) + sum(group)
    sums = [here.all_reduce(mine, "sum", group) for _ in range(_TIMES)]  # as many on a rank with wrong sums
    return all(torch.equal(x, right) for x in sums)


def _product_is_right(group: Group) -> bool:
    n = torch.arange(_SIZE, dtype=torch.float32, device="cpu")
    a, b = (n.unsqueeze(1) + n) % 7, (n.unsqueeze(1) * 3 + n) % 5
    right = (a.long().unsqueeze(2) * b.long()).sum(1).float()
    return all(torch.equal(a @ b, right) for _ in range(_TIMES))


_TESTS: dict[str, Callable[[Group], bool]] = {
    "known sums between ranks": _sum_is_right,
    "known products": _product_is_right,
}


def _wrong_ranks(test: Callable[[Group], bool], group: Group) -> list[int]:
    right = torch.tensor([int(test(group))], device="cpu")
    told: list[Tensor] = current_communicator().all_gather(right, group, [(1,)] * len(group))
    return [rank for rank, x in zip(group, told, strict=True) if not int(x)]
