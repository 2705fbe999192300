"""What programs are made of: a network, its loss, its optimizer and a strategy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import Slot, StateKey, slots_of
from meshwright.tensor import local_parts

from ._apart import lie_apart
from ._description import code_of
from ._strategy import Strategy

Mode = Literal["train", "eval", "predict"]


@dataclass(frozen=True, slots=True)
class Model:
    """What programs are recorded of."""

    network: nn.Module
    loss: Callable[..., Tensor] | None
    optimizer: Optimizer | None
    strategy: Strategy

    def slots(self) -> Sequence[Slot]:
        """Parameters and buffers."""
        return slots_of(self.network)

    def states(self) -> dict[StateKey, Any]:
        """The optimizer's states, by parameter and key; none where there is no optimizer."""
        if self.optimizer is None:
            return {}
        names = {id(s.tensor): s.name for s in self.slots()}
        held = ((p, state) for p, state in self.optimizer.state.items() if id(p) in names)
        return {(names[id(p)], key): value for p, state in held for key, value in state.items()}

    def call(self, mode: Mode, *batch: Any) -> Any:
        """The loss of a batch, whose last part labels are; in prediction, or without a loss, what the network gives."""
        if mode == "predict" or self.loss is None:
            return self.network(*batch)
        *inputs, labels = batch
        return self.loss(self.network(*inputs), labels)

    def constants(self) -> tuple[Any, ...]:
        """What a training step holds as constants: the optimizer's options beside learning rates."""
        return tuple(
            (at, key, _frozen(value))
            for at, group in enumerate(self.optimizer.param_groups if self.optimizer else ())
            for key, value in group.items()
            if key not in ("lr", "initial_lr", "params") and not isinstance(value, Tensor)
        )

    def lies_apart(self) -> bool:
        """True where each parameter, buffer and state lies in memory of its own."""
        with local_parts():
            return lie_apart((*(s.tensor for s in self.slots()), *self.states().values()))

    def writes(self) -> bool:
        """True where kernels may write parameters, buffers and states in place."""
        return self.strategy.inplace and self.lies_apart()

    def text(self) -> dict[str, str]:
        """What must be the same where programs are to be used."""
        plan = replace(self.strategy, compiler="none", max_programs=1)
        return {
            **code_of(self.network, self.loss, self.optimizer),
            "strategy": re.sub(r" at 0x\w+", "", repr(plan)),
            **{f"tensor {s.name}": f"{s.tensor.dtype}{list(s.tensor.shape)}" for s in self.slots()},
        }


def _frozen(value: Any) -> Any:
    """Return an option as a value that can be compared and hashed; of objects, their type."""
    if isinstance(value, (int, float, bool, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, cast("Sequence[Any]", value)))
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return ("dict", *((_frozen(key), _frozen(item)) for key, item in items))
    return type(value).__qualname__
