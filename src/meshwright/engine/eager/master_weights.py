"""Work around an optimizer's step: float32 copies of parameters, and states kept in the host's memory.

The optimizer's own code makes the update. For a parameter in half precision, the optimizer gets the float32 copy (the
*master weight*) with the gradient in float32. Then the value of the copy is written to the parameter. The copy is an
optimizer state like others: it has the layout of the updated part of the parameter, is saved with the states, and is
moved to the host with them.

States on the host are copied to the device bucket by bucket. Each bucket gets an update of its own, and its states are
copied back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import TorchValue, platform_of
from meshwright.tensor import DistTensor, as_part, distribute_as, local_parts

from .._errors import StrategyError
from .zero import UpdatedParts

MASTER = "master_weight"
"""Key of the float32 copy among a parameter's states."""

HALVES = (torch.float16, torch.bfloat16)
State = dict[str, Any]


class StateStorage(Protocol):
    """A memory that holds the optimizer's states between steps."""

    def keep(self, x: Tensor, old: Tensor | None) -> Tensor:
        """Return `x` copied to this memory; `old`, an earlier copy of the same form, is overwritten if given."""
        ...

    def bring(self, x: Tensor, device: torch.device) -> Tensor:
        """Return `x`, which `keep` returned, copied to the device."""
        ...

    def wait(self) -> None:
        """Wait until everything that was passed to `keep` can be read."""
        ...


class HostStorage:
    """The memory of the host. It is pinned where the device can pin it; states are then copied without waiting."""

    def __init__(self) -> None:
        self._written: set[torch.device] = set()

    def keep(self, x: Tensor, old: Tensor | None) -> Tensor:
        if x.device.type == "cpu":
            return x
        self._written.add(x.device)
        pinned = platform_of(x.device).pins_memory
        there = torch.empty_like(x, device="cpu", pin_memory=pinned) if old is None else old
        return there.copy_(x, non_blocking=there.is_pinned())

    def bring(self, x: Tensor, device: torch.device) -> Tensor:
        return x.to(device, non_blocking=True)

    def wait(self) -> None:
        while self._written:
            torch.accelerator.synchronize(self._written.pop())


@dataclass(eq=False)
class MasterWeightsAndOffload:
    """An optimizer's step with master weights (if `master` is set) and with states in `memory` (if it is given).

    The work of `stage` is done before and after all of it. A bucket holds parameters of about `bucket` bytes in
    float32.
    """

    master: bool = False
    memory: StateStorage | None = None
    stage: UpdatedParts | None = None
    bucket: int = 64 * 2**20
    _params: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    _open: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    _host: dict[Tensor, State] = field(default_factory=dict[Tensor, State])
    _loaded: dict[Any, State] = field(default_factory=dict[Any, State])
    _versions: dict[Tensor, int] = field(default_factory=dict[Tensor, int])

    def before(self, of: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.stage is not None:
            self.stage.before()
        if not (self.master or self.memory):
            return
        if any(callable(a) for a in (*args, *kwargs.values())):
            raise StrategyError(
                f"{type(of).__name__}.step(closure) with master_weights or offload",
                "a closure",
                "the closure would run the model while parameters or states are swapped for the step",
                "call loss.backward() before the step",
            )
        if self._params:
            raise StrategyError(
                f"{type(of).__name__}.step() with master_weights or offload",
                "an earlier step that has not ended",
                "parameters and states are still swapped for the earlier step, which failed or calls this step",
                "use an optimizer whose step does not call another class's step; after a failure, load a checkpoint",
            )
        self._params = [group["params"] for group in of.param_groups]
        *others, last = list(self._buckets(of)) or [[]]
        kind: TorchValue = type(of)
        for bucket in others:
            self._enter(of, bucket)
            kind.step.__wrapped__(of)  # without hooks, such as those that call this method
            self._leave(of)
        self._enter(of, last)

    def behind(self, of: Optimizer) -> None:
        if self.master or self.memory:
            self._leave(of)
            for group, params in zip(of.param_groups, self._params, strict=True):
                group["params"] = params
            self._params = []
        if self.memory is not None:
            self.memory.wait()
        if self.stage is not None:
            self.stage.behind()

    def lay(self, parameter: Tensor, state: State) -> None:
        """Give states that were loaded or made elsewhere their layouts, and move them to the memory."""
        if MASTER in state:
            state[MASTER] = _in_parameter_layout(state[MASTER], parameter)
        if self.stage is not None:
            self.stage.shard_states(parameter, state)
        if self.memory is not None:
            self._keep(parameter, state)
            self.memory.wait()

    def note_loaded(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Remember the states that `load_state_dict` is about to cast to the dtypes of parameters."""
        self._loaded = state["state"]

    def put_loaded(self, of: Optimizer) -> None:
        """Restore the dtype of each loaded state that `load_state_dict` cast to another dtype."""
        loaded, self._loaded = self._loaded, {}
        parameters = [p for group in of.param_groups for p in group["params"]]
        for at, p in enumerate(parameters):
            state: State = of.state.get(p, {})
            for key, x in loaded.get(at, {}).items():
                if isinstance(x, Tensor) and key in state and state[key].dtype != x.dtype:
                    state[key] = _mapped(x, lambda t, p=p: t.clone().to(_device(p)))
            self.lay(p, state)
        self._versions.clear()

    def _buckets(self, of: Optimizer) -> Iterator[list[Tensor]]:
        """Yield the parameters with gradients, bucket by bucket.

        An optimizer that is not from `torch.optim` gets all parameters at once.
        """
        found = [p for params in self._params for p in params if p.grad is not None]
        if self.memory is None or not type(of).__module__.startswith("torch.optim."):
            yield found
            return
        sizes = [0]
        for p in found:
            sizes.append(sizes[-1] + p.numel() * 4)
        for _, members in groupby(zip(found, sizes, strict=False), lambda pair: pair[1] // self.bucket):
            yield [p for p, _ in members]

    def _enter(self, of: Optimizer, bucket: Sequence[Tensor]) -> None:
        """Give the optimizer only these parameters (or their float32 copies), with their states on the device."""
        became: dict[Tensor, Tensor] = {}
        for p in bucket:
            state = self._brought(p, of.state.pop(p, {}))
            became[p] = self._copy(p, state) if self.master and p.dtype in HALVES else p
            if state:
                of.state[became[p]] = state
        for group, params in zip(of.param_groups, self._params, strict=True):
            group["params"] = [became[p] for p in params if p in became]
        self._open = list(became.items())

    def _leave(self, of: Optimizer) -> None:
        """Write the copies back to their parameters, and move the states to the memory."""
        for p, taken in self._open:
            state: State = of.state.pop(taken, {})
            if taken is not p:
                taken.grad = None
                with torch.no_grad():
                    p.copy_(taken)
                state[MASTER] = taken
                self._versions[p] = _version(p)
            self._keep(p, state)
            if state:
                of.state[p] = state
        self._open = []

    def _copy(self, p: Tensor, state: State) -> Tensor:
        """Return the float32 copy of the parameter, with the gradient in float32.

        Elements of the parameter that were written to since the last step replace those of the copy.
        """
        known = state.pop(MASTER, None)
        with torch.no_grad():
            copy = p.detach().float() if known is None else _in_parameter_layout(known, p)
            if known is not None and self._versions.get(p) != _version(p):
                copy = torch.where(copy.to(p.dtype) == p, copy, p.float())
            assert p.grad is not None
            copy.grad = p.grad.float()
        return copy

    def _brought(self, p: Tensor, state: State) -> State:
        if self.memory is None:
            return state
        memory, device = self.memory, _device(p)
        self._host[p] = {key: x for key, x in state.items() if _moves(p, x)}
        return {k: _mapped(x, lambda t: memory.bring(t, device)) if _moves(p, x) else x for k, x in state.items()}

    def _keep(self, p: Tensor, state: State) -> None:
        if self.memory is None:
            return
        memory, old = self.memory, self._host.pop(p, {})
        for key, x in state.items():
            if _moves(p, x):
                before = old.get(key)
                same = before is not None and (before.shape, before.dtype) == (x.shape, x.dtype)
                there = _local(old[key]) if same else None
                state[key] = _mapped(x, lambda t, there=there: memory.keep(t, there))


def _in_parameter_layout(x: Tensor, p: Tensor) -> Tensor:
    """Return a loaded copy in the current layout of its parameter."""
    return distribute_as(x, p.spec.mesh, p.spec.layout.with_varying(())) if isinstance(p, DistTensor) else x


def _moves(p: Tensor, x: object) -> bool:
    """True for a state as large as its parameter; counters stay where the optimizer has put them."""
    return isinstance(x, Tensor) and x.shape == p.shape and x.dim() > 0


def _mapped(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the result of `fn` on this rank's part of `x`, with the layout of `x`."""
    with local_parts():
        local = fn(x.detach().as_subclass(Tensor))
        if not isinstance(x, DistTensor):
            return local
        out = as_part(local.view_as(local), x._spec)
        out.__class__ = type(x)
        return out


def _local(x: Tensor) -> Tensor:
    with local_parts():
        return x.detach().as_subclass(Tensor)


def _version(x: Tensor) -> int:
    with local_parts():
        return x._version


def _device(x: Tensor) -> torch.device:
    with local_parts():
        return x.device
