"""The checks around a step of a static program; parameters are written only after the step was found right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.comm import current_communicator, is_compared, world_ranks
from meshwright.graph import InspectedStep
from meshwright.layout import generator_states, set_generator_states
from meshwright.tensor import DistTensor, collectives_of_call, map_tensors, tensors_in

from .._errors import ReplicaError
from .comparison_steps import Rhythm, compare_replicas
from .finite_gradients import should_skip_update
from .named_tensors import NamedTensor
from .replicas import bits
from .step_checks import current_checks

Result = tuple[Any, list[Any]]
"""Outputs, and the values that are written back."""


_SAME, _TRANSIENT, _LASTING = 0, 1, 2
_WHY = (
    "the fault is gone",
    "a third run equals one of the first two: the fault was transient",
    "a third run differs from both: the fault persists, or an operator is not deterministic",
)


class StepLike(Protocol):
    """A training step as a program; `apart` has the update as a separate part, if there is one."""

    @property
    def run(self) -> Callable[..., Result]: ...
    @property
    def apart(self) -> InspectedStep | None: ...


class StaticChecks:
    """The checks of the steps of one static model; `tensors` returns its parameters and states by name."""

    def __init__(self, tensors: Callable[[], Mapping[str, Any]]) -> None:
        self.tensors = tensors
        self.rhythm = Rhythm()
        self._last: tuple[StepLike, bool] | None = None

    def run(self, step: StepLike, given: Sequence[Any]) -> tuple[Any, list[Any] | None]:
        """Return the outputs of a training step, and the values that it writes (None if the update is skipped).

        Raises:
            ReplicaError: replicas differ, or the step gives other numbers when it is repeated.
            NonFiniteGradientError: a gradient has elements that are not finite. Both are raised on all ranks.
        """
        if not is_compared():
            return step.run(*given)
        checks, group = current_checks(), world_ranks()
        number, name = self.rhythm.step, f"step {self.rhythm.step} of a static model"
        with collectives_of_call("the check of a step"):
            compare_replicas(self.rhythm, checks, self._named, name, group)
        if checks.replay and number % checks.replay == 0:
            _replay(step.run, given, name)
        if not self._is_apart_on_all_ranks(step, group):
            with current_communicator().comparing_first():
                # a pipeline may update parameters before its own first collective
                current_communicator().any_true(False, group)
                return step.run(*given)

        apart = step.apart
        assert apart is not None

        def look_at(gradients: Mapping[str, Tensor]) -> bool:
            with collectives_of_call("the check of a step"):
                return should_skip_update(gradients, checks, name, group)

        return apart(given, look_at)

    def _is_apart_on_all_ranks(self, step: StepLike, group: tuple[int, ...]) -> bool:
        """True if every rank can look at gradients before the update; asked if the step is another than before."""
        if self._last is None or self._last[0] is not step:
            with current_communicator().comparing_first():
                is_whole_somewhere = current_communicator().any_true(step.apart is None, group)
            self._last = step, not is_whole_somewhere
        return self._last[1]

    def _named(self) -> list[NamedTensor]:
        return [NamedTensor(name, x) for name, x in self.tensors().items() if isinstance(x, DistTensor)]


def _replay(program: Callable[..., Result], given: Sequence[Any], name: str) -> None:
    """Run a step twice on copies of its inputs. Raises ReplicaError on all ranks if the results differ on a rank."""
    state, group = generator_states(), world_ranks()
    runs = [_once(program, given, state) for _ in range(2)]
    told = torch.tensor([float(_differ(*runs))], device="cpu")
    if current_communicator().all_reduce(told, "max", group).item():
        runs.append(_once(program, given, state))
        raise _replay_error(name, runs)
    set_generator_states(state)


def _once(program: Callable[..., Result], given: Sequence[Any], state: Mapping[str, Tensor]) -> Result:
    """Return the results of the program on copies of its inputs, from the given random states."""
    set_generator_states(state)
    return program(*map_tensors(lambda x: x.clone(), list(given)))


def _differ(a: Result, b: Result) -> bool:
    """True if the bits of two results differ."""
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return any(not torch.equal(bits(x), bits(y)) for x, y in pairs)


def _replay_error(name: str, runs: Sequence[Result]) -> ReplicaError:
    """Return the error about a step that gave other numbers when it was repeated; every rank makes the call."""
    a, b, c = runs
    kind = _SAME if not _differ(a, b) else _TRANSIENT if not (_differ(a, c) and _differ(b, c)) else _LASTING
    here, group = current_communicator(), world_ranks()
    kinds = [int(x) for x in here.all_gather(torch.tensor([kind], device="cpu"), group, [(1,)] * len(group))]
    ranks = ", ".join(str(rank) for rank, kind in zip(group, kinds, strict=True) if kind != _SAME)
    return ReplicaError(
        f"the replay of {name}",
        f"rank {ranks} gives other numbers in the second run",
        _WHY[max(kinds)],
        "start from the last checkpoint, with torch.use_deterministic_algorithms(True) if operators are the cause",
    )
