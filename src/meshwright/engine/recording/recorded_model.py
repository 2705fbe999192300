"""The inputs of a recording: a network, its loss, its optimizer and a strategy."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import ModelTensor, StateKey, model_tensors
from meshwright.layout import TorchValue
from meshwright.tensor import key_of_tree, local_parts

from .memory_overlap import share_no_memory
from .setting_text import code_of
from .strategy import Strategy

Mode = Literal["train", "eval", "predict"]
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """The network, loss, optimizer and strategy that programs are recorded from."""

    network: nn.Module
    loss: Callable[..., Tensor] | None
    optimizer: Optimizer | None
    strategy: Strategy

    def slots(self) -> Sequence[ModelTensor]:
        """Return the parameters and buffers."""
        return model_tensors(self.network)

    def states(self) -> dict[StateKey, Any]:
        """Return the optimizer's states by parameter and key; empty without an optimizer."""
        if self.optimizer is None:
            return {}
        names = {id(s.tensor): s.name for s in self.slots()}
        held = ((p, state) for p, state in self.optimizer.state.items() if id(p) in names)
        return {(names[id(p)], key): value for p, state in held for key, value in state.items()}

    def call(self, mode: Mode, *batch: TorchValue) -> TorchValue:
        """Return the loss of a batch, whose last part is the labels; without a loss, the network's result."""
        if mode == "predict" or self.loss is None:
            return self.network(*batch)
        *inputs, labels = batch
        return self.loss(self.network(*inputs), labels)

    def constants(self) -> tuple[Any, ...]:
        """Return the constants of a training step: the optimizer's options other than learning rates."""
        return tuple(
            (at, key, value if type(value) in _PLAIN else key_of_tree(value, _option_key))
            for at, group in enumerate(self.optimizer.param_groups if self.optimizer else ())
            for key, value in group.items()
            if key not in ("lr", "initial_lr", "params") and not isinstance(value, Tensor)
        )

    def lies_apart(self) -> bool:
        """True if no two parameters, buffers or states share memory."""
        with local_parts():
            return share_no_memory((*(s.tensor for s in self.slots()), *self.states().values()))

    def writes(self) -> bool:
        """True if kernels may write parameters, buffers and states in place."""
        return self.strategy.inplace and self.lies_apart()

    def text(self) -> dict[str, str]:
        """Return the facts, as text, that must be equal for a program to be used with this model."""
        plan = replace(self.strategy, compiler="none", max_programs=1)
        return {
            **code_of(self.network, self.loss, self.optimizer),
            "strategy": re.sub(r" at 0x\w+", "", repr(plan)),
            **{f"tensor {s.name}": f"{s.tensor.dtype}{list(s.tensor.shape)}" for s in self.slots()},
        }


def _option_key(value: object) -> Hashable:
    """Return a value that can be compared and hashed for a part of an option; of objects, their type."""
    return value if isinstance(value, _PLAIN) else type(value).__qualname__
