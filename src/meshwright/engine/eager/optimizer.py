"""Optimizers over distributed parameters: any of `torch.optim`, with a choice of the layouts of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import Placement
from meshwright.tensor import DistTensor

from .._errors import StaticError, StrategyError
from ..marks.module_memory import refuse_shared_parameters
from ..marks.tensors import shard_tensor
from .master_weights import MASTER, HostStorage, MasterWeightsAndOffload
from .zero import ShardingStage, ShardingStage1, ShardingStage2, ShardingStage3

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
StateFn = Callable[[str, DistTensor, DistTensor], "Sequence[Placement] | Tensor | None"]
"""`shard_fn(key, parameter, accumulator)` returns placements for the accumulator, another accumulator, or None."""
_STATE_LAYOUTS: WeakKeyDictionary[Optimizer, Callable[[Any], None]] = WeakKeyDictionary()
"""Optimizer → the function that lays out its states."""
_STEP_WORK: WeakKeyDictionary[Optimizer, MasterWeightsAndOffload] = WeakKeyDictionary()
"""Optimizer → the work around its steps."""


def shard_optimizer(
    optimizer: AnyOptimizer,
    shard_fn: StateFn | ShardingStage | None = None,
    *,
    master_weights: bool = False,
    offload: bool = False,
) -> AnyOptimizer:
    """Give the accumulators of `optimizer` the layouts that `shard_fn` chooses; returns the same optimizer.

    A sharding stage shards states, gradients and parameters as ZeRO does: `ShardingStage1("dp")`, `ShardingStage2("dp",
    model)`, `ShardingStage3("dp", model)`. Without `shard_fn`, accumulators have the layouts of their parameters. Whole
    plain states that are loaded are distributed in the same way. `shard_fn(key, parameter, accumulator)` is called once
    for each accumulator with its parameter's shape: after the step that creates it, or when it is loaded.

    With `master_weights`, parameters in half precision and their states are updated in float32. The float32 copies have
    the layout of the updated parts, and are the states "master_weight". With `offload`, states are in the host's memory
    between steps, and are copied to the device bucket by bucket. Neither supports a closure.

    Raises:
        StrategyError: the optimizer's step has been prepared already by another call.
    """
    around = _step_work(optimizer, shard_fn, master_weights, offload)
    if isinstance(shard_fn, (ShardingStage2, ShardingStage3)):
        shard_fn.apply(optimizer)
    if around is not None:
        _STEP_WORK[optimizer] = around
        _hook(optimizer, around)
    if isinstance(shard_fn, (ShardingStage1, ShardingStage2, ShardingStage3)):
        shard_fn = None
    if shard_fn is None:
        _register(optimizer, _lay_like_parameters, _lay_like_parameters)
    else:
        _lay_by(optimizer, shard_fn)
    return optimizer


def _lay_like_parameters(of: Optimizer, *_: object) -> None:
    """Give the states of an optimizer the layouts of their parameters.

    This hook runs no user code, and has no closure. So the guards trust it: the step of an optimizer with this hook is
    recorded like that of a plain one.
    """
    for parameter, state in of.state.items():
        if isinstance(parameter, DistTensor):
            _distribute_state(parameter, state, None, set())


def _lay_by(optimizer: Optimizer, shard_fn: StateFn) -> None:
    """Give the states of an optimizer the layouts that the user's function chooses, now and after steps and loads."""
    asked: set[tuple[int, str]] = set()

    def lay(of: Optimizer, *_: object) -> None:
        known = asked if of is optimizer else set[tuple[int, str]]()  # a copy of the optimizer, whose step is recorded
        for parameter, state in of.state.items():
            if isinstance(parameter, DistTensor):
                _distribute_state(parameter, state, shard_fn, known)

    def lay_again(*_: object) -> None:
        asked.clear()
        lay(optimizer)

    _register(optimizer, lay, lay_again)


def _register(optimizer: Optimizer, lay: Callable[..., None], lay_again: Callable[..., None]) -> None:
    """Lay out the states now, after steps and after loads."""
    _STATE_LAYOUTS[optimizer] = lay
    optimizer.register_step_post_hook(lay)
    optimizer.register_load_state_dict_post_hook(lay_again)
    lay(optimizer)


def replace_parameters(optimizer: Optimizer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's parameters by their successors, which keep the states; both are matched by name."""
    became = {old: after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [became.get(p, p) for p in group["params"]]
    for old, new in became.items():
        if new is not old and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _hook(optimizer: Optimizer, around: MasterWeightsAndOffload) -> None:
    """Register the work around the steps of this optimizer."""
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_behind_step)
    optimizer.register_load_state_dict_pre_hook(around.note_loaded)
    optimizer.register_load_state_dict_post_hook(around.put_loaded)


def _before_step(of: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do the work before a step of an optimizer, but not of a copy of it, whose step is recorded."""
    if of in _STEP_WORK:
        _STEP_WORK[of].before(of, args, kwargs)


def _behind_step(of: Optimizer, *_: object) -> None:
    """Do the work behind a step of an optimizer, but not of a copy of it, whose step is recorded."""
    if of in _STEP_WORK:
        _STEP_WORK[of].behind(of)


def distribute_states(optimizer: Optimizer, parameter: Tensor, states: dict[str, Any]) -> None:
    """Lay out states of a parameter, which the optimizer does not have yet, as `shard_optimizer` has set."""
    lay, around = _STATE_LAYOUTS.get(optimizer), _STEP_WORK.get(optimizer)
    if lay is not None:
        lay(SimpleNamespace(state={parameter: states}))
    if around is not None:
        around.lay(parameter, states)


def refuse_master_weights(optimizer: Optimizer) -> None:
    """Raise StaticError for an optimizer whose states are elsewhere between steps."""
    around = _STEP_WORK.get(optimizer)
    if around is not None and (around.master or around.memory):
        raise StaticError(
            "a static step of an optimizer with master_weights or offload",
            "parameters or states that Python swaps before a step",
            "a program reads and writes parameters and states in place",
            'keep parameters in float32 and pass Strategy(amp={"enable": True, "level": "O2"}), which casts them',
        )


def _step_work(
    optimizer: Optimizer, shard_fn: object, master_weights: bool, offload: bool
) -> MasterWeightsAndOffload | None:
    stage = shard_fn.around(optimizer) if isinstance(shard_fn, ShardingStage1) else None
    known = _STEP_WORK.get(optimizer)
    if stage is None and not (master_weights or offload):
        return None
    if known is not None:
        raise StrategyError(
            f"mw.shard_optimizer({type(optimizer).__name__}, ...)",
            "an optimizer that shard_optimizer has already prepared",
            "the hooks around a step can be set only once",
            "make one call with shard_fn, master_weights and offload together",
        )
    asked = f"shard_optimizer of {type(optimizer).__name__} with master_weights or offload"
    refuse_shared_parameters((p for group in optimizer.param_groups for p in group["params"]), asked)
    return MasterWeightsAndOffload(master_weights, HostStorage() if offload else None, stage)


def _distribute_state(
    parameter: DistTensor, state: dict[str, Any], shard_fn: StateFn | None, asked: set[tuple[int, str]]
) -> None:
    for key, value in state.items():
        if (
            not isinstance(value, Tensor)
            or value.shape != parameter.shape
            or (id(parameter), key) in asked
            or key == MASTER
        ):
            continue
        if value.dim() == 0 and not isinstance(value, DistTensor):  # a step counter beside a scalar parameter
            continue
        asked.add((id(parameter), key))
        laid = value if isinstance(value, DistTensor) else shard_tensor(value, parameter.mesh, parameter.placements)
        wish = shard_fn(key, parameter, laid) if shard_fn is not None else None
        state[key] = wish if isinstance(wish, Tensor) else laid if wish is None else shard_tensor(laid, laid.mesh, wish)
