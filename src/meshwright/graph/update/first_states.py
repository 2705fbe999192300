"""Detection of optimizer states that can be created before the first step, so that all steps run one program.

The first step of most optimizers fills new states with a number, and then does the same as every later step. To check
this, two recordings are compared, one without states and one with states. From the results backward both must be equal,
except for values that the second recording reads from states and the first one fills with a number.

SGD with momentum is another case: its first step takes the gradient as the state, and later steps add the gradient to a
multiple of the state. The state may then be 0 before the first step. Only the sign of a zero can differ: 0 + -0.0 is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..program.effects import is_random_operator
from ..program.node import Conversion, Node, Op, Value, tensor_dtype
from ..program.program import Input, Program

aten = torch.ops.aten
Pair = tuple[Value, Value]


def made_states(update: Program) -> dict[tuple[str, str], Input]:
    """Return the states that an update creates, as inputs of the next one, without Python numbers."""
    states: Mapping[tuple[str, str], Any] = update.outputs["state"]
    made = {key: v for key, v in states.items() if isinstance(v, Value) and v.is_tensor}
    return {key: _state_input(key, v, update) for key, v in made.items()}


def _state_input(key: tuple[str, str], v: Value, update: Program) -> Input:
    name, spec = ".".join(key), update.specs.get(v)
    shape = v.shape if spec is None else tuple(spec.shape)
    return Input(replace(v, name=name, shape=shape), "state", name, spec, key)


def with_first_states(first: Program, again: Program) -> Program | None:
    """Return `again` with the first number of each new state set in its input; None if the first step differs."""
    states = first.outputs["state"]
    if again.outputs["state"] or any(is_random_operator(node.op) for node in first.nodes):
        return None
    numbers = _first_numbers(first, again, states)
    if numbers is None or numbers.keys() != states.keys():
        return None
    inputs = (replace(i, first=numbers[i.source]) if _is_state_of(i, states) else i for i in again.inputs)
    return replace(again, inputs=tuple(inputs))


def _is_state_of(given: Input, states: Mapping[tuple[str, str], Any]) -> bool:
    return given.role == "state" and given.source in states


@dataclass(slots=True)
class _Comparison:
    """The comparison of two recordings, and the number that each state must be filled with so that they agree."""

    first: Program
    again: Program
    states: Mapping[Any, Any]
    numbers: dict[Any, float] = field(default_factory=dict[Any, float])
    first_inputs: dict[Value, Input] = field(init=False)
    inputs: dict[Value, Input] = field(init=False)

    def __post_init__(self) -> None:
        self.first_inputs = {i.value: i for i in self.first.inputs}
        self.inputs = {i.value: i for i in self.again.inputs}

    def agrees(self) -> bool:
        """True if the results of both recordings agree; adds the numbers of states."""
        todo, done = _results(self.first, self.again, self.states), set[Pair]()
        while todo:
            pair = todo.pop()
            if pair in done:
                continue
            done.add(pair)
            operands = self._operands_of(*pair)
            if operands is None:
                return False
            todo += operands
        return True

    def _operands_of(self, a: Value, b: Value) -> list[Pair] | None:
        """Return the pairs that must agree so that `a` of the first recording and `b` agree; None if they differ."""
        given = self.inputs.get(b)
        if given is None:
            found = _operand_pairs(self.first.producers.get(a), self.again.producers[b], a, b)
            return self._operands_of_sum(a, b) if found is None else found
        if _is_state_of(given, self.states):
            number = _number_in(self.first, self.first_inputs, a)
            return [] if a.dtype == b.dtype and self._fill(given, number) else None
        return [] if _is_same_input(self.first_inputs.get(a), given) else None

    def _operands_of_sum(self, a: Value, b: Value) -> list[Pair] | None:
        """Return the pair that must agree if `b` adds a multiple of a state, which is then 0; None for other nodes."""
        state, operands = _added_to_zero(self.first, self.again, a, b)
        given = None if state is None else self.inputs.get(state)
        return operands if given is not None and self._fill(given, 0.0) else None

    def _fill(self, given: Input, number: float | None) -> bool:
        """Note the number that fills a state; False if it is no state, or needs another number too."""
        if number is None or not _is_state_of(given, self.states):
            return False
        return self.numbers.setdefault(given.source, number) == number


def _first_numbers(first: Program, again: Program, states: Mapping[Any, Any]) -> dict[Any, float] | None:
    """Return the number that each state is filled with; None if the recordings differ."""
    compared = _Comparison(first, again, states)
    if not compared.agrees():
        return None
    return {key: 0.0 for key, v in states.items() if _is_empty(v)} | compared.numbers


def _is_empty(v: Value) -> bool:
    """True for a value without elements, such as a state of a parameter on another stage: any number fills it."""
    return v.is_tensor and 0 in v.sizes


def _results(first: Program, again: Program, states: Mapping[Any, Any]) -> list[Pair]:
    """Return pairs of results of both recordings: final values of parameters and states, and other outputs."""
    after = dict(again.writes)
    held = {i.source: i.value for i in again.inputs if _is_state_of(i, states)}
    new_states = [(v, after.get(held[key], held[key])) for key, v in states.items() if key in held]
    others = [(first.outputs[name], again.outputs[name]) for name in first.outputs if name != "state"]
    return [*_final_inputs(first, again), *new_states, *others]


def _final_inputs(first: Program, again: Program) -> Iterator[Pair]:
    """Yield pairs of the final values of the inputs that both recordings have."""
    before, after = dict(first.writes), dict(again.writes)
    named = {(i.role, i.name): i.value for i in again.inputs if i.role != "constant"}
    for i in first.inputs:
        same = named.get((i.role, i.name))
        if same is not None:
            yield before.get(i.value, i.value), after.get(same, same)


def _operand_pairs(x: Node | None, y: Node, a: Value, b: Value) -> list[Pair] | None:
    """Return pairs of the operands of two nodes; None if the nodes differ."""
    if x is None or x.op != y.op or x.outs.index(a) != y.outs.index(b) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return None
    pairs: list[Pair] = []
    same = _append_pairs(x.args, y.args, pairs) and _append_pairs(dict(x.kwargs), dict(y.kwargs), pairs)
    return pairs if same else None


def _added_to_zero(first: Program, again: Program, a: Value, b: Value) -> tuple[Value | None, list[Pair]]:
    """Return the input that must be 0 so that `b` is another value alone, and the pair of `a` and this value.

    Returns None and no pairs if `b` is no sum of a value and a multiple of an input.
    """
    node = again.producers[b]
    if node.op != aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.ins) != 2:
        return None, []
    scaled, added = node.ins
    if (a.dtype, a.shape) != (b.dtype, b.shape) or (added.dtype, added.shape) != (b.dtype, b.shape):
        return None, []
    while (maker := again.producers.get(scaled)) is not None and _is_multiple(maker):
        (scaled,) = maker.ins
    while (maker := first.producers.get(a)) is not None and maker.op in _COPYING:
        (a,) = maker.ins
    return scaled, [(a, added)]


def _is_multiple(node: Node) -> bool:
    """True for the product of a tensor and a finite number."""
    if node.op != aten.mul.Tensor or len(node.ins) != 1:
        return False
    return isinstance(node.args[1], (int, float)) and isfinite(node.args[1])


def _append_pairs(a: TorchValue, b: TorchValue, pairs: list[Pair]) -> bool:
    """Append the pairs of values in two trees to `pairs`; False if the trees differ otherwise."""
    if isinstance(a, Value) and isinstance(b, Value):
        pairs.append((a, b))
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_append_pairs(x, y, pairs) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_append_pairs(x, b[key], pairs) for key, x in a.items())
    return bool(a == b)


def _is_same_input(a: Input | None, b: Input) -> bool:
    if a is None or a.role != b.role:
        return False
    if isinstance(a.source, Tensor) and isinstance(b.source, Tensor):
        return a.source.dtype == b.source.dtype and torch.equal(a.source, b.source)
    return a.source == b.source if a.role == "number" else a.name == b.name


_COPYING = {aten.clone.default, aten.detach.default, aten.alias.default}
"""Operators whose result equals the operand."""
_PASSING = {
    *(*_COPYING, aten.contiguous.default, aten._to_copy.default),
    *(aten.view.default, aten.reshape.default, aten.expand.default, aten.t.default, aten.lift_fresh.default),
}
"""Operators whose result is filled with the number that fills the operand."""
_FILLING: dict[Any, int] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1),
}
"""Operator that fills a tensor → the number."""
_PLACES: dict[Any, int] = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
"""Operator that fills a tensor with one of its arguments → position of the argument."""


def _number_in(program: Program, inputs: Mapping[Value, Input], v: Value) -> float | None:
    """Return the number that fills a value, or None if it is unknown."""
    node = program.producers.get(v)
    if node is not None and node.op == aten.empty.memory_format and _is_empty(v):
        return 0.0
    if node is None:
        source = inputs[v].source
        return _number_of(source) if isinstance(source, Tensor) else None
    if node.op in _PLACES:
        number = node.args[_PLACES[node.op]]
        return number if isinstance(number, (int, float)) else None
    if node.op in _FILLING:
        return _FILLING[node.op]
    return _number_in(program, inputs, node.args[0]) if _passes(node.op) else None


def _passes(op: Op) -> bool:
    """True if the result is filled with the number that fills the operand."""
    if isinstance(op, Conversion):
        return not op.src.layout.partial and not op.dst.layout.partial
    return op in _PASSING


def _number_of(x: Tensor) -> float | None:
    """Return the number that fills a constant, or None if its elements differ."""
    if x.numel() == 0 or x.is_complex() or not bool((x == x.reshape(-1)[0]).all()):
        return None
    return x.reshape(-1)[0].item()


def new_state(given: Input, shape: tuple[int, ...], strides: tuple[int, ...] | None, device: str) -> Tensor:
    """Return a new state of this shape, filled with its first number."""
    assert given.first is not None
    dtype = tensor_dtype(given.value)
    if strides is None:
        return torch.full(shape, given.first, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(given.first)
