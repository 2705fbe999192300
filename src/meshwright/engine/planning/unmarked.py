"""Run a script without marks: each module is planned at its first call, and distributed over all ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from meshwright.comm import current_communicator
from meshwright.cost import Cluster
from meshwright.graph import Program, capture
from meshwright.layout import Spec, TorchValue, replicated
from meshwright.search import MeshPlan, SearchError
from meshwright.tensor import DistTensor, distribute_as, keep_own_part, leaves_in, map_leaves

from ..marks.module_memory import ModuleMemory
from .auto import MOST, fastest, resolve_cluster

CUTS_ALONE = "a script gets shardings only, without ZeRO, recomputation or gradient accumulation"


@contextmanager
def unmarked(cluster: Cluster | str | None = None) -> Generator[None]:
    """Distribute modules without distributed parameters, inside the block, by the best plan for their first inputs.

    The outermost module of a call is planned, and its inputs are distributed from then on. Parameters stay the same
    objects, so that existing optimizers go on. The script's loop and optimizer are not changed, so a plan consists of
    shardings only. Every rank makes the same calls.

    Raises:
        SearchError, CaptureError: as in `auto`, at the first call.
    """
    planner, plain = _Planner(cluster), nn.Module.__call__

    @wraps(plain)
    def call(module: nn.Module, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        with planner.entered(module, args, kwargs) as (args, kwargs):
            return plain(module, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = plain


class _Depth(threading.local):
    """The number of module calls that a thread is inside of."""

    value = 0


class _Planner:
    def __init__(self, cluster: Cluster | str | None) -> None:
        self._machines = resolve_cluster(cluster)
        self._known: WeakKeyDictionary[nn.Module, Mapping[int, Spec]] = WeakKeyDictionary()
        self._depth = _Depth()

    @contextmanager
    def entered(self, module: nn.Module, args: TorchValue, kwargs: TorchValue) -> Generator[tuple[Any, Any]]:
        """Yield the arguments for the module, inside its call; those of the outermost module are distributed."""
        self._depth.value += 1
        try:
            yield self._arguments(module, args, kwargs) if self._depth.value == 1 else (args, kwargs)
        finally:
            self._depth.value -= 1

    def _arguments(self, module: nn.Module, args: TorchValue, kwargs: TorchValue) -> TorchValue:
        if module not in self._known:
            parameters = list(module.parameters())
            is_ours = parameters and not any(isinstance(p, DistTensor) for p in parameters)
            self._known[module] = self._distribute_module(module, args, kwargs) if is_ours else {}
        batch = self._known[module]
        numbers = iter(range(len(list(leaves_in((args, kwargs))))))
        return map_leaves(lambda x: _distributed_input(x, batch.get(next(numbers))), (args, kwargs))

    def _distribute_module(self, module: nn.Module, args: TorchValue, kwargs: TorchValue) -> Mapping[int, Spec]:
        """Distribute the module as its plan says; return the layouts of its inputs by their numbers."""
        memory = ModuleMemory(module, f"distributing {type(module).__name__} without marks")
        program = capture(
            module, lambda args, kwargs: module(*args, **kwargs), (args, kwargs), most=MOST, is_run=False
        ).program
        plan = self._sharding_plan(program)
        if current_communicator().rank == 0:
            print(f"{type(module).__name__} on {str(plan).splitlines()[0]}; {CUTS_ALONE}", file=sys.stderr)
        specs: dict[Tensor, Spec] = {}
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            whole = Spec(plan.mesh, replicated(x.dim()), x.shape, x.dtype)
            specs[x] = plan.layouts.get(name, whole)
        memory.check(lambda slot: specs[slot.tensor])
        for x, spec in specs.items():
            keep_own_part(x, spec)
        memory.tie()
        return {i.source: plan.layouts[i.name] for i in program.inputs if i.role == "batch" and i.name in plan.layouts}

    def _sharding_plan(self, program: Program) -> MeshPlan:
        """Return the plan of shardings only. Raises SearchError if it does not fit."""
        try:
            return fastest(program, self._machines, saving=False)
        except SearchError as error:
            write = f"{error.write}; or call mw.auto(model, loader, loss, optimizer), whose plans may use these"
            raise SearchError(error.asked, error.found, f"{error.why}; {CUTS_ALONE}", write) from error


def _distributed_input(x: TorchValue, spec: Spec | None) -> TorchValue:
    """Return a plain input in the layout of the plan; an input of other sizes gets the same layout."""
    if spec is None or not isinstance(x, Tensor) or isinstance(x, DistTensor) or x.dim() != spec.ndim:
        return x
    return distribute_as(x, spec.mesh, spec.layout)
