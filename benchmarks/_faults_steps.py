"""Rows 17 to 19, 22 and 23: numbers that go wrong on one rank, and impossible layouts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._fault_runs import Ended, Verdict, mark_fault, run_ranks

HIDDEN, BATCH, STEPS, FAULT_AT = 16, 8, 6, 3


def train(folder: str, case: str) -> None:
    """Train one rank of a run in which rank 1 fails at step 3, as `case` says."""
    here = mw.init_process()
    torch.manual_seed(0)
    mesh = mw.init_mesh(tp=2) if case.startswith("tp") else mw.init_mesh(dp=2)
    net = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
    cut = [mw.Shard(0)] if case.startswith("tp") else [mw.Replicate()]
    for layer in (net[0], net[2]):
        for name, p in [*layer.named_parameters()]:
            setattr(layer, name, mw.shard_tensor(p, mesh, cut))
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.01)
    data = mw.shard_tensor(torch.randn(BATCH, HIDDEN), mesh, [mw.Replicate() if "tp" in case else mw.Shard(0)])
    clean = data.clone()
    mw.check_steps("skip" if "skip" in case else "stop", replicas=1, replay=1 if "replay" in case else 0)
    model = mw.to_static(net, None, nn.functional.mse_loss, optimizer) if "static" in case else None
    for step in range(STEPS):
        fault = here.rank == 1 and (step == FAULT_AT or ("lasting" in case and step > FAULT_AT))
        if fault and "collective" in case and step == FAULT_AT:
            mark_fault(folder)
            _damage_sums("lasting" in case)
        if model is not None:
            if fault:
                mark_fault(folder)
                _damage(net, data, case)
            print(float(model(data, data)))
            data = clean.clone()
            continue
        optimizer.zero_grad()
        ((net(data) - data) ** 2).mean().backward()
        if fault:
            mark_fault(folder)
            _damage(net, data, case)
        optimizer.step()
    print("finished", float(sum(mw.unshard_dtensor(p).sum() for p in net.parameters())))


def _damage(net: nn.Module, data: Tensor, case: str) -> None:
    first = next(net.parameters())
    if "nan" in case:
        _local(data if "static" in case else first.grad)[0, 0] = float("nan")
    elif "flip" in case:
        _local(first).view(torch.int32)[0, 0] ^= 1 << 12


def _local(x: Tensor | None) -> Tensor:
    assert isinstance(x, mw.DistTensor)
    return x.to_local().detach()


def _damage_sums(lasting: bool) -> None:
    """Change one bit of the next large sum of this rank, or of all sums."""
    from meshwright.comm import CommCall, ProcessCommunicator

    moved, left = ProcessCommunicator._moved, [1]

    def damaged(self: ProcessCommunicator, call: CommCall, sends: Any, out: Any = ()) -> Any:
        found = moved(self, call, sends, out)
        is_large = call.kind == "all_reduce" and found[0].is_floating_point() and found[0].numel() > HIDDEN
        if is_large and (left[0] or lasting):
            left[0] = 0
            found[0].view(-1).view(torch.int32)[0] ^= 1 << 12
        return found

    ProcessCommunicator._moved = damaged


def layouts(folder: str, case: str) -> None:
    """Request an impossible layout on one rank."""
    rank = mw.init_process().rank
    mesh = mw.init_mesh(dp=2)
    mark_fault(folder)
    if case == "parts":
        print(mw.dtensor_from_local(torch.full((3 + 2 * rank,), 3.0 + rank), mesh, [mw.Shard(0)]).mean().item())
    elif case == "parameter":
        mw.shard_tensor(nn.Parameter(torch.ones(3)), mesh, [mw.Partial()])
    elif case == "duplicate":
        mw.ProcessMesh([0, 0], ["dp"])
    elif case == "negative":
        mw.ProcessMesh([[0, -1]], ["a", "b"])
    elif case == "too many":
        mw.init_mesh(dp=4)
    elif case == "dim":
        mw.shard_tensor(torch.ones(3), mesh, [mw.Shard(2)])
    elif case == "overlapping":
        other = mw.ProcessMesh([1, 0], ["x"])
        print(*[mw.shard_tensor(torch.ones(4), on, [mw.Shard(0)]) for on in (mesh, other)], sep="+")
        print(sum(mw.shard_tensor(torch.ones(4), on, [mw.Shard(0)]) for on in (mesh, other)))
    elif case == "uneven":
        x = mw.shard_tensor(torch.arange(3.0), mesh, [mw.Shard(0)])
        one = mw.shard_tensor(torch.arange(1.0), mesh, [mw.Shard(0)])
        assert (x.mean().item(), one.sum().item()) == (1.0, 0.0)
        raise RuntimeError("fix: both are right")


def _verdict_on(function: str, cases: Sequence[str], told: Callable[[str, Ended], bool]) -> Verdict:
    missed: list[str] = []
    times: list[float] = []
    for case in cases:
        ended = run_ranks(f"benchmarks._faults_steps:{function}", 2, arguments=[case])
        times += [e.seconds for e in ended]
        if not all(told(case, e) for e in ended):
            missed.append(case)
    text = f"{len(cases) - len(missed)} of {len(cases)}" + (f"; not {', '.join(missed)}" if missed else "")
    return Verdict(not missed, text, max(times))


BAD = ("dp nan", "tp nan", "dp static nan", "tp static nan", "tp skip nan", "dp skip nan", "tp static skip nan")
FLIPS = ("dp flip", "dp static flip")
SUMS = ("dp collective", "dp collective lasting", "dp static replay collective")


def _names_the_tensor(case: str, e: Ended) -> bool:
    if "skip" in case:
        return e.status == 0 and "finished" in e.output and "nan" not in e.output.splitlines()[-1]
    return e.status > 0 and "NonFiniteGradientError" in e.output and "rank" in e.output


def bad_numbers() -> Verdict:
    """NaN in the gradients of one rank: all ranks stop or skip before the update, and name the tensor."""
    return _verdict_on("train", BAD, _names_the_tensor)


def flipped() -> Verdict:
    """A bit flips in one replica of a parameter: the next comparison names tensor and rank."""
    return _verdict_on(
        "train", FLIPS, lambda _, e: e.status > 0 and "ReplicaError" in e.output and "0.weight" in e.output
    )


def corrupted() -> Verdict:
    """A collective gives a wrong sum: found, and a transient fault is distinguished from one that persists."""
    return _verdict_on("train", SUMS, _is_classified)


def _is_classified(case: str, e: Ended) -> bool:
    return e.status > 0 and ("the fault persists" if "lasting" in case else "fault was transient") in e.output


LAYOUTS = ("parts", "parameter", "duplicate", "negative", "too many", "dim", "overlapping", "uneven")


def wrong_sizes() -> Verdict:
    """Sizes that do not fit the mesh: an error before any collective, or the right uneven result."""
    return _verdict_on(
        "layouts", ("parts", "too many", "dim", "uneven"), lambda _, e: e.status > 0 and "fix:" in e.output
    )


def wrong_meshes() -> Verdict:
    """Duplicate ranks, negative ones, pending parameters, overlapping meshes: a clear error for each."""
    cases = ("parameter", "duplicate", "negative", "overlapping")
    return _verdict_on("layouts", cases, lambda _, e: e.status > 0 and "fix:" in e.output)


ROWS: dict[int, Callable[[], Verdict]] = {
    17: bad_numbers, 18: flipped, 19: corrupted, 22: wrong_sizes, 23: wrong_meshes,
}  # fmt: skip

if __name__ == "__main__":
    for ended in run_ranks(f"benchmarks._faults_steps:{sys.argv[1]}", 2, arguments=[sys.argv[2]]):
        print(f"--- rank {ended.rank}: status {ended.status} after {ended.seconds} s\n{ended.output[-1500:]}")
