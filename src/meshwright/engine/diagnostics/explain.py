"""Explain the decisions for each call of a program, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from meshwright.comm import (
    Communicator,
    NoCommunicatorError,
    PeerlessCommunicator,
    current_communicator,
    using_communicator,
)
from meshwright.layout import Spec
from meshwright.reshard import ConversionPlan, Relabel, transposed
from meshwright.reshard import plan as reshard_plan
from meshwright.search import text_table
from meshwright.tensor import CallRecord

from ..marks.decision_record import record

_HEAD = ("call", "operand", "becomes", "by", "bytes", "result")
_NUMBERS = {_HEAD.index("bytes")}
_REMARKS = {
    "ring": "keys and values travel the ring",
    "ulysses": "all-to-all: heads instead of the sequence",
    "whole": "on whole tensors: no rule",
    "parts": "as the calls below",
    "operators": "as the calls below",
}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The decisions on `rank`: each call with its operands' layouts, the inserted steps, and its results' layouts.

    `calls` holds the same as values. `collectives` counts the communication by kind, and `received` is the bytes
    received for it. Both include backward passes and the reading of values. `result` is the result of the function.
    """

    rank: int
    calls: tuple[CallRecord, ...]
    collectives: dict[str, int]
    received: int
    result: Any

    def __str__(self) -> str:
        rows = [_HEAD] + [row for call in self.calls for row in _rows(call, self.rank)]
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.collectives.items())) or "no communication"
        last = f"rank {self.rank}: {counts}, {self.received} bytes received"
        return "\n".join([*text_table(rows, _NUMBERS), last])

    __repr__ = __str__


def explain(fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Explanation:
    """Run `fn(*args, **kwargs)` and return the decisions for each call in it; print the result.

    Inside `simulate` or a process, every rank makes the call and gets its own account. Without ranks, `fn` runs as rank
    0 of a world in which no data arrive, whatever the size of the mesh: layouts, steps and bytes are right, numbers are
    not.

    >>> import torch, meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["tp"])
    >>> def program():
    ...     a = mw.shard_tensor(torch.ones(4, 8), mesh, [mw.Replicate()])
    ...     b = mw.shard_tensor(torch.ones(8, 6), mesh, [mw.Shard(0)])
    ...     return torch.relu(a @ b)
    >>> print(mw.explain(program))
    call    operand        becomes       by                bytes  result
    matmul  f32[4, 8]      f32[4, 8@tp]  Slice(tp, dim 1)      0  f32[4, 6] +tp
            f32[8@tp, 6]
    relu    f32[4, 6] +tp  f32[4, 6]     AllReduce(tp)        96  f32[4, 6]
    rank 0: 1 all_reduce, 96 bytes received
    """
    with _current_or_peerless() as communicator:
        seen = communicator.seen
        calls, received = Counter(seen.calls), seen.total_received
        with record() as found:
            result = fn(*args, **kwargs)
        made = Counter(seen.calls) - calls
        return Explanation(communicator.rank, tuple(found), dict(made), seen.total_received - received, result)


def _current_or_peerless() -> AbstractContextManager[Communicator]:
    """Return a context with the current communicator, or with one without peers if there is none."""
    try:
        return nullcontext(current_communicator())
    except NoCommunicatorError:
        return using_communicator(PeerlessCommunicator())


def _rows(call: CallRecord, rank: int) -> Iterator[tuple[str, ...]]:
    """Yield one row per operand; the first also has the call's name, its results and any remark."""
    operands = list(_operands(call)) or [("", None)]
    results = ", ".join(map(repr, call.outs))
    for at, (operand, plan) in enumerate(operands):
        becomes, by, received = _change(plan, rank)
        if at == 0:
            by = by or _REMARKS.get(call.how, "")
        yield (call.name if at == 0 else "", operand, becomes, by, received, results if at == 0 else "")


def _operands(call: CallRecord) -> Iterator[tuple[str, ConversionPlan | None]]:
    """Yield every distributed operand with the plan that changes it, then the plain operands that change."""
    plans = {at: move.plan for at, move in call.moves}
    sure = {at for at, plan in plans.items() if at < len(call.ins) and call.ins[at] is plan.src}
    for at, spec in enumerate(call.ins):
        others = (k for k, plan in plans.items() if k not in sure and plan.src is spec)
        number = at if at in sure else next(others, None)
        yield repr(spec), None if number is None else plans.pop(number)
    for plan in plans.values():
        yield f"{plan.src!r} (plain)", plan


def _change(plan: ConversionPlan | None, rank: int) -> tuple[str, str, str]:
    """Return the operand's new layout, the steps to it, and the bytes; without steps, the steps of its gradient."""
    if plan is None:
        return "", "", ""
    steps = " · ".join(repr(step) for step in plan.steps if not isinstance(step, Relabel))
    back = transposed(plan.src, plan.dst)
    return _target(plan.src, plan.dst), steps or f"gradient: {reshard_plan(*back)!r}", str(plan.received(rank))


def _target(src: Spec, dst: Spec) -> str:
    return repr(dst) if dst.mesh is src.mesh else f"{dst!r} on {dst.mesh!r}"
