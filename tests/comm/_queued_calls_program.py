"""`python _queued_calls_program.py FOLDER STORY`: one of two ranks whose calls are put into a queue, as on a device.

The queue is simulated: a call of this program returns at once, and moves no data.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import CommCall, DisagreementError, ProcessCommunicator
from meshwright.comm.process import process_communicator
from meshwright.comm.process.transfers import Transfers
from meshwright.tensor import DistTensor

LIMIT = 60.0
Case = Callable[[nn.Parameter, bool], object]


def _queued(self: ProcessCommunicator, x: Tensor) -> bool:
    return x.is_floating_point()


def _moves_nothing(self: Transfers, x: Tensor, call: CommCall, into: Tensor | None) -> Tensor:
    return x.clone()


def _stays(self: Transfers, x: Tensor, shapes: Any, group: Any, into: Any = ()) -> list[Tensor]:
    return [torch.zeros(shape, dtype=x.dtype) for shape in shapes]


def wait_for(path: Path) -> None:
    """Return as soon as the file exists."""
    end = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def goes_on(folder: Path, here: ProcessCommunicator) -> None:
    """Make ten calls on rank 0 before rank 1 makes its first one after that of the link; both make sixty in all."""
    here.all_reduce(torch.ones(3), "sum", (0, 1))
    if here.rank == 1:
        wait_for(folder / "ten")
    for at in range(60):
        here.all_reduce(torch.ones(3), "sum", (0, 1))
        if at == 9 and here.rank == 0:
            (folder / "ten").touch()
    here.settle()


def waits_elsewhere(folder: Path, here: ProcessCommunicator) -> None:
    """Wait on rank 0 for its device forever, after a call that rank 1 makes differently."""
    here.all_reduce(torch.ones(3), "sum", (0, 1))
    here.settle()
    if here.rank == 0:
        here.all_reduce(torch.ones(3), "sum", (0, 1))
        (folder / "made").touch()
        time.sleep(LIMIT)
    wait_for(folder / "made")
    here.all_reduce(torch.ones(3), "max", (0, 1))
    time.sleep(LIMIT)


def by_optimizer(w: nn.Parameter, other: bool) -> None:
    w.grad = _gradient(other)
    torch.optim.SGD([w], lr=0.1).step()


def by_fused_optimizer(w: nn.Parameter, other: bool) -> None:
    w.grad = _gradient(other)
    torch.optim.AdamW([w], lr=0.1, fused=True).step()


def without_checks(w: nn.Parameter, other: bool) -> None:
    mw.check_steps("off", replicas=0)
    by_optimizer(w, other)


def by_hand(w: nn.Parameter, other: bool) -> None:
    grad = _gradient(other)
    with torch.no_grad():
        w.sub_(grad)


def by_hand_in_data(w: nn.Parameter, other: bool) -> None:
    w.data -= _gradient(other)


def by_data(w: nn.Parameter, other: bool) -> None:
    w.data = _gradient(other)


def by_item(w: nn.Parameter, other: bool) -> None:
    grad = _gradient(other)
    with torch.no_grad():
        w[:] = grad


def by_out(w: nn.Parameter, other: bool) -> None:
    grad = _gradient(other)
    with torch.no_grad():
        torch.add(grad, 1, out=w)


CASES: tuple[Case, ...] = (
    *(by_optimizer, by_fused_optimizer, without_checks, by_hand, by_hand_in_data, by_data, by_item, by_out),
)


def _gradient(other: bool) -> DistTensor:
    """Return the sum of two tensors that arrive in another order on one rank."""
    a, b = (_laid(mw.Shard(0)) for _ in range(2))
    first, second = (b, a) if other else (a, b)
    return mw.reshard(first, first.spec.mesh, [mw.Replicate()]) + mw.reshard(second, first.spec.mesh, [mw.Replicate()])


def _laid(placement: mw.Placement) -> DistTensor:
    return mw.shard_tensor(torch.ones(4, 3), mw.init_mesh(tp=2), [placement])


def outcome_of(case: Case, here: ProcessCommunicator) -> dict[str, Any]:
    """Return the outcome of one case: the error, and whether the parameter is unchanged."""
    w = nn.Parameter(_laid(mw.Replicate()))
    mw.check_steps(replicas=0)
    try:
        case(w, here.rank == 1)
        error = ""
    except DisagreementError as found:
        error = str(found)
    return {"error": error, "is as before": bool((w.detach().to_local() == 1).all())}


def main() -> None:
    folder, story = Path(sys.argv[1]), sys.argv[2]
    ProcessCommunicator._is_queued = _queued
    process_communicator.is_small = lambda call: False  # no call of a queue moves its data in frames
    Transfers.reduce_all = _moves_nothing
    Transfers.gather = _stays
    here = mw.init_process()
    assert isinstance(here, ProcessCommunicator)
    if story != "updates":
        {"goes on": goes_on, "waits elsewhere": waits_elsewhere}[story](folder, here)
        return
    found = {case.__name__: outcome_of(case, here) for case in CASES}
    (folder / f"{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
