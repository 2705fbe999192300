"""Computation of values that depend on no input, such as masks, positions and tables of constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..program.draft import Draft, Spot
from ..program.effects import is_pure
from ..program.node import map_values, values_in
from ..torch_hooks import Operator, no_modes
from .node_reader import Operand, VirtualValue

LARGEST = 2**26
"""Maximum number of elements of a computed value."""


def known_tensor(draft: Draft, v: Operand) -> Tensor | None:
    """Return the tensor that `v` is on every run, on the CPU; None if it depends on an input or is too large."""
    written = {x for x, _ in draft.program.writes}
    given = (g for g in draft.program.inputs if g.value not in written and type(g.source) is Tensor)
    known = _KnownValues(draft, {g.value: g.source for g in given})
    with no_modes(), torch.no_grad():
        out = known.value_of(v)
    return out if isinstance(out, Tensor) else None


@dataclass(frozen=True, slots=True)
class _KnownValues:
    """Values computed so far: the result of each operator, None if it depends on an input or is too large."""

    draft: Draft
    found: dict[Operand, TorchValue]

    def value_of(self, v: Operand) -> TorchValue:
        if v not in self.found:
            self.found[v] = self._computed(v)
        return self.found[v]

    def _computed(self, v: Operand) -> TorchValue:
        call = v if isinstance(v, VirtualValue) else self.draft.producer(v)
        if call is None or not isinstance(call.op, Operator) or not is_pure(call.op) or not _is_small(v):
            return None
        operands = {x: self.value_of(x) for x in _operands(call)}
        if any(value is None for value in operands.values()):
            return None
        args, kwargs = _known_arguments(call, operands)
        out = call.op(*args, **kwargs)
        return out if isinstance(call, VirtualValue) or call.out is v else out[call.outs.index(v)]


def _operands(call: VirtualValue | Spot) -> Iterator[Operand]:
    """Yield the values that a call reads, those that no node produces first."""
    yield from (a for a in call.args if isinstance(a, VirtualValue))
    yield from values_in((call.args, call.kwargs))


def _known_arguments(
    call: VirtualValue | Spot, operands: Mapping[Operand, TorchValue]
) -> tuple[tuple[TorchValue, ...], dict[str, TorchValue]]:
    """Return the arguments of a call for known operands, with the CPU as the device."""
    given = tuple(operands[a] if isinstance(a, VirtualValue) else a for a in call.args)
    args, kwargs = map_values(operands.__getitem__, (given, call.kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    return args, kwargs


def _is_small(v: Operand) -> bool:
    size = 1
    for n in v.shape:
        if not isinstance(n, int):
            return False
        size *= n
    return size <= LARGEST
