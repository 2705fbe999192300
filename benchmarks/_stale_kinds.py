"""The table of all kinds of change between training steps, by theme."""

from __future__ import annotations

from . import (
    _stale_classes,
    _stale_configs,
    _stale_containers,
    _stale_functions,
    _stale_globals,
    _stale_hooks,
    _stale_libraries,
    _stale_losses,
    _stale_methods,
    _stale_modules,
    _stale_objects,
    _stale_optimizers,
    _stale_process,
    _stale_strategies,
    _stale_tensors,
    _stale_torch,
    _stale_torch_objects,
    _stale_values,
)
from ._stale_case import ADDED, Kind

THEMES = (
    _stale_containers, _stale_values, _stale_configs, _stale_objects, _stale_classes, _stale_globals, _stale_process,
    _stale_functions, _stale_methods, _stale_modules, _stale_tensors, _stale_hooks, _stale_losses, _stale_optimizers,
    _stale_torch, _stale_torch_objects, _stale_libraries, _stale_strategies,
)  # fmt: skip
"""The files that add kinds when they are imported."""

KINDS: dict[str, Kind] = dict(sorted(ADDED.items(), key=lambda pair: pair[1].by_loss))
"""Every kind by name; those whose setting the loss reads come last."""

__all__ = ["KINDS", "Kind"]
