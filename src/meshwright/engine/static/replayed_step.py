"""Training steps that a device replays: recorded as a device graph once their addresses stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Communicator, DeviceGraph, current_communicator, has_graphs, is_compared, world_ranks
from meshwright.graph import Conversion, Node, Operator, Program, Run, Start, is_random_call
from meshwright.layout import TorchValue
from meshwright.tensor import map_tensors

from .._errors import StaticError
from ..checks.step_checks import current_checks
from ..recording.without_gc import garbage_collection_paused
from .program_builder import CompiledProgram

ASKED = "a step with cuda_graph = true"
_LEAVE_OUT = "leave out cuda_graph"
_Problem = tuple[str, str, str]
"""The reason why a step cannot be replayed: what was found, why that is a problem, and what to do."""
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operators whose results the host reads."""


def with_replays(found: CompiledProgram, communicates_by: frozenset[str]) -> CompiledProgram:
    """Return a training step whose work is replayed from its second call with equal addresses on.

    The step that creates the optimizer's states runs once, so it is returned as it is. `communicates_by` are the kinds
    of calls that a graph must hold: "collectives", "messages".

    Raises:
        StaticError: the step needs the host, so a device cannot replay it.
    """
    refuse_replays(found.program, current_communicator(), communicates_by)
    if found.program.outputs.get("state"):
        return found
    return replace(found, run=ReplayedStep(found), apart=None)


def refuse_replays(program: Program, here: Communicator, communicates_by: frozenset[str]) -> None:
    """Raise StaticError if a device cannot replay the program, because the host has a part in it."""
    problem = next(_problems(program, here, communicates_by), None)
    if problem is not None:
        raise StaticError(ASKED, *problem)


def _problems(program: Program, here: Communicator, communicates_by: frozenset[str]) -> Iterator[_Problem]:
    """Yield what hinders a replay of the program."""
    if not has_graphs(program.device):
        why = "a step is replayed as a graph of the device, by torch.accelerator.Graph of torch 2.13 or later"
        yield f"a program on {program.device}, which has no graphs", why, _LEAVE_OUT
    on_host = next((i for i in program.inputs if i.value.is_tensor and i.value.device == "cpu"), None)
    if on_host is not None:
        why = "a replay would use the value from the recording"
        fix = "keep it on the device: pass capturable=True to the optimizer, and move buffers and batches"
        yield f"{on_host.role} {on_host.name!r} on the CPU", why, fix
    for node in program.nodes:
        yield from _problems_of(node)
    missing = sorted(communicates_by - here.replayed) if here.size > 1 else []
    if missing:
        why = "a graph of the device holds calls of the device's own transport only"
        fix = f"{_LEAVE_OUT}, or call init_process with the transport of the device"
        yield f"{' and '.join(missing)} through the memory of the host", why, fix


def _problems_of(node: Node) -> Iterator[_Problem]:
    named = f"{node.op} {node.origin.where}".rstrip()
    if isinstance(node.op, Operator) and any(tag in node.op.tags for tag in _READS):
        yield named, "the host reads its result, or its shape", f"{_LEAVE_OUT}, or the operator"
    if is_random_call(node):
        yield named, "a replay would draw the random numbers of the recording", f"{_LEAVE_OUT}, or the operator"


def calls_of(program: Program, is_pipeline: bool) -> frozenset[str]:
    """Return the kinds of calls that a step makes."""
    converts = any(isinstance(node.op, (Conversion, Start)) for node in program.nodes)
    return frozenset({"collectives"} if converts else ()) | frozenset({"messages"} if is_pipeline else ())


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step: its graph, the addresses and numbers that it was recorded for, and its tensors."""

    graph: DeviceGraph[TorchValue]
    key: tuple[Any, ...]
    given: tuple[Any, ...]


class ReplayedStep:
    """A training step as a function of its inputs, as `Run`. All ranks replay it, or none does.

    A step is recorded when it is called with the addresses of its latest call, and with equal numbers, such as learning
    rates. Each replay copies the batch to fixed addresses first. Outputs are copies, since the next replay overwrites
    them.
    """

    def __init__(self, step: CompiledProgram) -> None:
        self._run: Run = step.run
        self._writes = step.writes
        self._is_batch = tuple(i.role == "batch" and i.value.is_tensor for i in step.inputs)
        self._latest: tuple[Any, ...] | None = None
        self._recorded: _Recorded | None = None

    def __call__(self, *given: TorchValue) -> tuple[Any, list[Any]]:
        _refuse_checks()
        key = self._key(given)
        if self._recorded is not None:
            if _all_agree(key == self._recorded.key):
                return self._replay(self._recorded, given)
            self._recorded = self._latest = None
        if not _all_agree(key == self._latest):
            self._latest = key
            return self._run(*given)
        self._recorded = self._record(key, given)
        return self._replay(self._recorded, given)

    def _key(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the addresses of all tensors but those of the batch, and all numbers."""
        apart = (x for x, is_batch in zip(given, self._is_batch, strict=True) if not is_batch)
        return tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in apart)

    def _record(self, key: tuple[Any, ...], given: Sequence[Any]) -> _Recorded:
        """Record the step, with copies of the batch as inputs."""
        held = tuple(x.clone() if is_batch else x for x, is_batch in zip(given, self._is_batch, strict=True))

        def work() -> TorchValue:
            outputs, written = self._run(*held)
            for at, value in zip(self._writes, written, strict=True):
                held[at].copy_(value)
            return outputs

        device = next(x.device for x in held if isinstance(x, Tensor))
        with garbage_collection_paused():  # a recording would contain what a collection frees
            return _Recorded(DeviceGraph(work, device), key, held)

    def _replay(self, recorded: _Recorded, given: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Queue the step. The values to write back are the written tensors themselves."""
        for held, x, is_batch in zip(recorded.given, given, self._is_batch, strict=True):
            if is_batch:
                held.copy_(x)
        recorded.graph.replay()
        return map_tensors(torch.clone, recorded.graph.result), [given[at] for at in self._writes]


def _all_agree(mine: bool) -> bool:
    """True if `mine` is True on all ranks that make the step."""
    group = world_ranks()
    return mine if len(group) == 1 else not current_communicator().any_true(not mine, group)


def _refuse_checks() -> None:
    """Raise StaticError if gradients are to be looked at before the update."""
    checks = current_checks()
    if is_compared() and checks.bad_numbers != "off":
        raise StaticError(
            ASKED,
            f"check_steps({checks.bad_numbers!r})",
            "the host reads gradients before the update, and a device replays both together",
            'call mw.check_steps("off") on every rank',
        )
