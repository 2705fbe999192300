"""The checks around a step of a static program, which writes parameters only after it was found right."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.comm import current, is_compared
from meshwright.tensor import DistTensor, called_for, map_tensors, tensors_in

from .._errors import ReplicaError
from . import _numbers, _replicas
from ._eager import Rhythm
from ._settings import StepChecks, chosen
from ._tensors import Named

Result = tuple[Any, list[Any]]
"""Outputs, and the values that are written back."""


_SAME, _TRANSIENT, _LASTING = 0, 1, 2
_WHY = (
    "the fault is gone",
    "a third run gives the numbers of one of the first two: the fault was transient",
    "a third run gives other numbers, too: the fault persists, or an operator is not deterministic",
)


class InputLike(Protocol):
    """An input of a program."""

    @property
    def role(self) -> str: ...
    @property
    def name(self) -> str: ...


class StaticChecks:
    """The checks of the steps of one static model; `tensors` gives its parameters and states by name."""

    def __init__(self, tensors: Callable[[], Mapping[str, Any]]) -> None:
        self.tensors = tensors
        self.rhythm = Rhythm()

    def run(self, program: Callable[..., Result], given: Sequence[Any]) -> Result:
        """Return what a training step gives; twice, and compared, if it is time for that.

        Raises ReplicaError if the step gives other numbers the second time.
        """
        checks = chosen()
        if not (is_compared() and checks.replay and self.rhythm.step % checks.replay == 0):
            return program(*given)
        state = _random_states()
        runs = [_once(program, given, state) for _ in range(2)]
        told = torch.tensor([float(_differ(*runs))])
        group = tuple(range(current().size))
        if current().all_reduce(told, "max", group).item():
            runs.append(_once(program, given, state))
            raise _told_apart(self.rhythm.step, runs)
        return runs[1]

    def leaves_out(self, inputs: Sequence[InputLike], writes: Sequence[int], written: Sequence[Any]) -> bool:
        """Look at what a step is about to write, and at replicas; True if all ranks are to leave the writes out.

        Raises NonFiniteGradientError and ReplicaError, on all ranks.
        """
        if not is_compared():
            return False
        with called_for("the check of a step"):
            held = {inputs[at].name: x for at, x in zip(writes, written, strict=True) if inputs[at].role == "parameter"}
            return self._checked(chosen(), held)

    def _checked(self, checks: StepChecks, written: Mapping[str, Any]) -> bool:
        rhythm, group, found = self.rhythm, tuple(range(current().size)), None
        if rhythm.is_due(checks):
            begin = time.perf_counter()
            found = _replicas.difference([Named(n, x) for n, x in self.tensors().items() if isinstance(x, DistTensor)])
            rhythm.took = time.perf_counter() - begin
        names = [] if checks.bad_numbers == "off" else list(written)
        mine = _numbers.first_bad([written[name] for name in names])
        told = torch.tensor([mine, -(found is not None), -rhythm.wish()])
        first, differs, wish = current().all_reduce(told, "min", group).tolist()
        step = f"step {rhythm.step} of a static model"
        if differs:
            raise _replicas.error_of(step, *found) if found is not None else _replicas.error_elsewhere(step)
        rhythm.advance(checks.replicas or -wish)
        if first == _numbers.NONE:
            return False
        error = _numbers.error_of(step, f"what is written to {names[mine]}" if mine < len(names) else None, mine, group)
        if checks.bad_numbers == "stop":
            raise error
        warnings.warn(f"{error.asked} is left out: {error.found}", RuntimeWarning, stacklevel=4)
        return True


def _random_states() -> tuple[Tensor, list[Tensor]]:
    devices = torch.accelerator.is_available()
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if devices and torch.cuda.is_available() else []


def _once(program: Callable[..., Result], given: Sequence[Any], state: tuple[Tensor, list[Tensor]]) -> Result:
    """Return what the program gives for copies of its inputs, from the same random states."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    return program(*map_tensors(lambda x: x.clone(), list(given)))


def _differ(a: Result, b: Result) -> bool:
    """True if two runs gave other bits."""
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return any(not torch.equal(_replicas.bits(x), _replicas.bits(y)) for x, y in pairs)


def _told_apart(step: int, runs: Sequence[Result]) -> ReplicaError:
    """Return the error about a step that gave other numbers when it was made again; every rank makes the call."""
    a, b, c = runs
    kind = _SAME if not _differ(a, b) else _TRANSIENT if not (_differ(a, c) and _differ(b, c)) else _LASTING
    here, group = current(), tuple(range(current().size))
    kinds = [int(x) for x in here.all_gather(torch.tensor([kind]), group, [(1,)] * len(group))]
    ranks = ", ".join(str(rank) for rank, kind in zip(group, kinds, strict=True) if kind != _SAME)
    return ReplicaError(
        f"the replay of step {step} of a static model", f"rank {ranks} gives other numbers than in the first run",
        _WHY[max(kinds)],
        "start again from the last checkpoint; torch.use_deterministic_algorithms(True) if operators are the cause",
    )  # fmt: skip
