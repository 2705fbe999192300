"""Tracing of a rule's function: the operators that it calls on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue
from meshwright.tensor import map_tensors, operators_recorded

from .._errors import RewriteError
from ..program.effects import writes_to
from ..program.node import Node, Origin, Value
from ..program.shape_inference import FreshNames, as_values, stem_of
from ..torch_hooks import FakeMode, Operator, imagining, memory_of, no_modes

SILENT = {"lift_fresh", "detach_", "alias", "device", "sym_size", "sym_numel", "sym_stride"}
"""Operators that return their argument unchanged or only query metadata; they are not traced."""

Modes = tuple[str, torch.dtype] | None


@dataclass(frozen=True, slots=True)
class CallTrace:
    """Trace of a function: its inputs, its calls, and its result with values for tensors."""

    inputs: Mapping[str, Value]
    calls: tuple[Node, ...]
    out: TorchValue


@dataclass(slots=True)
class _Watch:
    values: dict[int, Value] = field(default_factory=dict[int, Value])
    memories: dict[int, Value] = field(default_factory=dict[int, Value])
    kept: list[Tensor] = field(default_factory=list[Tensor])
    calls: list[Node] = field(default_factory=list[Node])
    names: FreshNames = field(default_factory=lambda: FreshNames(iter(())))

    def bind(self, x: Tensor, value: Value) -> None:
        self.values[id(x)] = value
        self.memories.setdefault(memory_of(x), value)
        self.kept.append(x)

    def value(self, x: Tensor) -> Value:
        found = self.values.get(id(x))
        found = self.memories.get(memory_of(x)) if found is None else found
        if found is None or found.shape != tuple(x.shape):
            raise RewriteError(
                "a function of a rule",
                f"a tensor of shape {tuple(x.shape)} that no operator computed",
                "a rule may use only its arguments",
                "use numbers, or an argument of the rule",
            )
        return found

    def note(self, op: Operator, args: TorchValue, kwargs: TorchValue, out: TorchValue) -> None:
        if op._schema.name.split("::")[1] in SILENT:
            return
        if writes_to(op):
            raise RewriteError(
                "a function of a rule",
                f"{op} writes to an argument",
                "programs have no writes",
                f"use the operator without the underscore: {str(op).replace('_.', '.')}",
            )
        shown = as_values(out, lambda: self.names.fresh(stem_of(op)))
        self.calls.append(Node(op, map_tensors(self.value, args), map_tensors(self.value, kwargs), shown))
        self._bind_all(out, shown)

    def _bind_all(self, out: TorchValue, shown: TorchValue) -> None:
        if isinstance(out, Tensor):
            self.bind(out, shown)
        elif isinstance(out, (tuple, list)):
            for x, v in zip(out, shown, strict=True):
                self._bind_all(x, v)


def trace_calls(fn: Callable[..., Any], given: Mapping[str, Any], modes: Modes = None) -> CallTrace:
    """Return the trace of `fn` for the arguments `given`. Values are passed as fake tensors, others unchanged."""
    seen = _Watch()
    with no_modes(), imagining(_mode(given)), torch.no_grad(), _autocast(modes):
        args = {name: _stand_in(seen, v) if isinstance(v, Value) else v for name, v in given.items()}
        with operators_recorded(seen.note):
            out = fn(**args)
        form = map_tensors(seen.value, out)
    return CallTrace({name: v for name, v in given.items() if isinstance(v, Value)}, tuple(seen.calls), form)


def origin_modes(origin: Origin) -> tuple[bool, Modes]:
    """Return the modes that a node ran in: True if gradients were enabled, and the autocast mode."""
    return origin.grad, origin.autocast


def _autocast(modes: Modes) -> AbstractContextManager[object]:
    return nullcontext() if modes is None else torch.autocast(modes[0], modes[1])


def _mode(given: Mapping[str, Any]) -> FakeMode:
    for v in given.values():
        for n in v.shape if isinstance(v, Value) else ():
            if not isinstance(n, int):
                return FakeMode(shape_env=n.node.shape_env)
    return FakeMode()


def _stand_in(seen: _Watch, value: Value) -> Tensor:
    x = torch.empty(value.shape, dtype=value.dtype, device=value.device)  # pyright: ignore[reportArgumentType, reportCallIssue] - or int, float
    seen.bind(x, value)
    return x
