"""Optimizers over distributed parameters: any `torch.optim` one, with a say in where its states live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import Placement
from meshwright.tensor import DistTensor

from ._sharding import ShardingStage, ShardingStage1, ShardingStage2, ShardingStage3
from ._tensors import shard_tensor

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
StateFn = Callable[[str, DistTensor, DistTensor], "Sequence[Placement] | Tensor | None"]
"""`shard_fn(key, parameter, accumulator)` gives placements for the accumulator, another accumulator, or None."""
_LAYS: WeakKeyDictionary[Optimizer, Callable[[Any], None]] = WeakKeyDictionary()
"""Optimizer → what lays the states of anything that has some."""


def shard_optimizer(optimizer: AnyOptimizer, shard_fn: StateFn | ShardingStage | None = None) -> AnyOptimizer:
    """`optimizer` whose accumulators lie as `shard_fn` says; returns the same optimizer.

    A sharding stage cuts states, gradients and parameters as ZeRO does: `ShardingStage1("dp")`,
    `ShardingStage2("dp", model)`, `ShardingStage3("dp", model)`. Without `shard_fn` accumulators lie as their
    parameters do, as torch makes them. States that are loaded as whole plain tensors are laid over the mesh like that,
    too. `shard_fn(key, parameter, accumulator)` is asked once for each accumulator that has its parameter's shape,
    after the step that makes it or when it is loaded.
    """
    if isinstance(shard_fn, (ShardingStage1, ShardingStage2, ShardingStage3)):
        shard_fn.apply(optimizer)
        shard_fn = None
    asked: set[tuple[int, str]] = set()

    def lay(of: Optimizer, *_: Any) -> None:
        known = asked if of is optimizer else set[tuple[int, str]]()  # a copy of it, whose step is recorded
        for parameter, state in of.state.items():
            if isinstance(parameter, DistTensor):
                _lay_state(parameter, state, shard_fn, known)

    def lay_again(*_: Any) -> None:
        asked.clear()
        lay(optimizer)

    _LAYS[optimizer] = lay
    optimizer.register_step_post_hook(lay)
    optimizer.register_load_state_dict_post_hook(lay_again)
    lay(optimizer)
    return optimizer


def lay_states(optimizer: Optimizer, parameter: Tensor, states: dict[str, Any]) -> None:
    """Lays states of a parameter, which the optimizer does not have yet, as `shard_optimizer` was told."""
    lay = _LAYS.get(optimizer)
    if lay is not None:
        lay(SimpleNamespace(state={parameter: states}))


def _lay_state(
    parameter: DistTensor, state: dict[str, Any], shard_fn: StateFn | None, asked: set[tuple[int, str]]
) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or (id(parameter), key) in asked:
            continue
        if value.dim() == 0 and not isinstance(value, DistTensor):  # a step counter beside a scalar parameter
            continue
        asked.add((id(parameter), key))
        laid = value if isinstance(value, DistTensor) else shard_tensor(value, parameter.mesh, parameter.placements)
        wish = shard_fn(key, parameter, laid) if shard_fn is not None else None
        state[key] = wish if isinstance(wish, Tensor) else laid if wish is None else shard_tensor(laid, laid.mesh, wish)
