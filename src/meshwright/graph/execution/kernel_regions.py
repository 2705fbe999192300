"""Split of a program into nodes before, in and after compiled kernels, and the form of numbers in kernels.

Numbers that depend on learning rates and step counters alone are computed first by Python in double precision. Kernels
read them from one tensor. Numbers that kernels compute, such as `.item()` of a norm, are float64 tensors in kernels. An
operator that needs a Python number runs after the kernels, node by node, and so do all readers of its results. Numbers
that nothing reads do not count, such as the lengths that fused attention returns on CUDA beside its tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.layout import TorchValue, platform_of

from ..program.effects import is_assertion, is_random_call
from ..program.node import Conversion, Node, Op, Start, Value, Wait, map_values
from ..program.program import Program
from ..recording.symbolic_numbers import maximum, minimum

aten = torch.ops.aten
Scalar = Tensor | float
"""A number in kernels: a float64 tensor, or a constant."""


@dataclass(frozen=True, slots=True)
class Regions:
    """The nodes before, in and after the kernels. Kernels read the `numbers` from the tensor `packed`."""

    before: tuple[Node, ...]
    kernels: tuple[Node, ...]
    behind: tuple[Node, ...]
    numbers: tuple[Value, ...]
    packed: Value

    @property
    def made(self) -> tuple[Value, ...]:
        """The values that kernels compute."""
        return tuple(v for node in self.kernels for v in node.outs)


def regions(program: Program, known: Container[Value]) -> Regions:
    """Split the program into three parts; `known` are numbers that are constants in kernels."""
    split = _Split(known, _scalar_nodes(program), _read_values(program))
    split.early.update(i.value for i in program.inputs if i.role == "scalar")
    for node in program.nodes:
        split.place(node)
    device = str(program.device) if platform_of(program.device).has_streams else "cpu"
    packed = Value("numbers", (len(split.packed),), torch.float64, device)
    taken = [Node(aten.select.int, (packed, 0, at), {}, out) for at, out in enumerate(split.packed.values())]
    behind = _without_unread(split.behind, program.results)
    return Regions(tuple(split.before), (*taken, *split.kernels), behind, tuple(split.packed), packed)


def _read_values(program: Program) -> set[Value]:
    """Return the values that a node, an output or a write reads."""
    return {*program.results, *(v for node in program.nodes for v in node.ins)}


# --- nodes before the kernels ----------------------------------------------------------------------------------


def _scalar_nodes(program: Program) -> set[Node]:
    """Return the nodes on scalars that are needed for Python numbers and depend on scalar inputs only."""
    ready = {i.value for i in program.inputs if not i.value.is_tensor or i.value.shape == ()}
    able: list[Node] = []
    for node in program.nodes:
        if _is_small(node) and all(v in ready for v in node.ins):
            able.append(node)
            ready.update(node.outs)
    wanted: set[Value] = set()
    found: set[Node] = set()
    for node in reversed(able):
        if any(not v.is_tensor or v in wanted for v in node.outs):
            found.add(node)
            wanted.update(node.ins)
    return found


def _is_small(node: Node) -> bool:
    plain = (
        not isinstance(node.op, (Conversion, Start, Wait)) and not is_assertion(node.op) and not is_random_call(node)
    )
    return plain and bool(node.outs) and all(v.shape == () for v in node.outs)


def _without_unread(nodes: Sequence[Node], results: Sequence[Value]) -> tuple[Node, ...]:
    """Return the nodes without nodes on numbers that are not read."""
    read, kept = set(results), list[Node]()
    for node in reversed(nodes):
        if any(v.is_tensor or v in read for v in node.outs) or not node.outs:
            kept.append(node)
            read.update(node.ins)
    return tuple(reversed(kept))


# --- numbers in kernels ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Split:
    known: Container[Value]
    first: Container[Node]
    read: Container[Value]
    before: list[Node] = field(default_factory=list[Node])
    kernels: list[Node] = field(default_factory=list[Node])
    behind: list[Node] = field(default_factory=list[Node])
    packed: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Number that Python computes → its tensor in kernels."""
    doubles: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Number that kernels compute → its tensor in kernels."""
    late: set[Value] = field(default_factory=set[Value])
    """Tensors that are computed after the kernels."""
    early: set[Value] = field(default_factory=set[Value])
    """Numbers that are available before the kernels."""

    def place(self, node: Node) -> None:
        """Assign the node to one of the three parts."""
        if node in self.first:
            self.before.append(node)
            self.early.update(v for v in node.outs if not v.is_tensor)
        elif any(not v.is_tensor and v in self.read for v in node.outs) or not any(v.is_tensor for v in node.outs):
            self._place_number(node)
        else:
            self._place_tensors(node)

    def _place_number(self, node: Node) -> None:
        """Place a node on numbers after the kernels, and as a tensor operation also in the kernels if possible."""
        self.behind.append(node)
        self.late.update(v for v in node.outs if v.is_tensor)
        function = DOUBLES.get(node.op)
        if function is None or node.out.dtype is not float or any(v in self.late for v in node.ins):
            return
        args = self._with_tensors(node.args)
        if args is not None:
            self.doubles[node.out] = made = Value(node.out.name, (), torch.float64)
            self.kernels.append(Node(function, args, {}, made, node.origin))

    def _place_tensors(self, node: Node) -> None:
        numbers = any(not v.is_tensor and v not in self.known for v in node.ins) or _has_alpha(node)
        late = any(v in self.late for v in node.ins)
        args = kwargs = None
        if numbers and not late and node.op in WITH_TENSORS:
            args, kwargs = self._with_tensors(node.args), self._with_tensors(node.kwargs)
        if late or (numbers and (args is None or kwargs is None)):
            self.behind.append(node)
            self.late.update(node.outs)
        elif numbers:
            given = {**(kwargs or {}), "dtype": node.outs[0].dtype}
            self.kernels.append(Node(WITH_TENSORS[node.op], args or (), given, node.out, node.origin))
        else:
            self.kernels.append(node)

    def _with_tensors(self, args: TorchValue) -> TorchValue:
        """Return the arguments with numbers replaced by tensors; None if a number has no tensor in kernels."""
        missing: list[Value] = []
        found = map_values(lambda v: self._tensor_of(v, missing), args)
        return None if missing else found

    def _tensor_of(self, v: Value, missing: list[Value]) -> Value:
        if v.is_tensor or v in self.known:
            return v
        if v in self.doubles:
            return self.doubles[v]
        if v.dtype is not float or v not in self.early:
            missing.append(v)
            return v
        return self.packed.setdefault(v, Value(f"{v.name}_number", (), torch.float64))


def _has_alpha(node: Node) -> bool:
    """True for a sum with `alpha`: after a matrix product, Inductor (torch 2.13) ignores `alpha`."""
    return node.op in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs.get("alpha", 1) != 1


def double_of(x: Tensor) -> Tensor:
    """Return a one-element tensor as a float64 scalar tensor."""
    return x.reshape(()).to(torch.float64)


def least(*numbers: Scalar) -> Tensor:
    return torch.stack([torch.as_tensor(n, dtype=torch.float64, device="cpu") for n in numbers]).amin()


def largest(*numbers: Scalar) -> Tensor:
    return torch.stack([torch.as_tensor(n, dtype=torch.float64, device="cpu") for n in numbers]).amax()


def _identity(x: Tensor) -> Tensor:
    return x


DOUBLES: Mapping[Op, Callable[..., Tensor]] = {
    aten._local_scalar_dense.default: double_of,
    operator.add: operator.add,
    operator.mul: operator.mul,
    operator.pow: operator.pow,
    operator.truediv: operator.truediv,
    float: _identity,
    abs: torch.abs,
    minimum: least,
    maximum: largest,
    math.sqrt: torch.sqrt,
    math.exp: torch.exp,
    math.log: torch.log,
    math.cos: torch.cos,
    math.sin: torch.sin,
    math.tanh: torch.tanh,
}
"""Function that returns a Python number → function that returns a float64 scalar tensor."""


def product(x: Tensor, y: Scalar, *, dtype: torch.dtype) -> Tensor:
    return (x * y).to(dtype)


def quotient(x: Tensor, y: Scalar, *, dtype: torch.dtype) -> Tensor:
    return (x / y).to(dtype)


def power(x: Tensor, y: Scalar, *, dtype: torch.dtype) -> Tensor:
    return (x**y).to(dtype)


def total(x: Tensor, y: Scalar, *, alpha: Scalar = 1, dtype: torch.dtype) -> Tensor:
    return (x + y * alpha).to(dtype)


def difference(x: Tensor, y: Scalar, *, alpha: Scalar = 1, dtype: torch.dtype) -> Tensor:
    return (x - y * alpha).to(dtype)


def between(x: Tensor, y: Tensor, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.lerp(x, y, weight.to(x.dtype)).to(dtype)


def plus_product(x: Tensor, a: Tensor, b: Tensor, *, value: Scalar = 1, dtype: torch.dtype) -> Tensor:
    return (x + value * a * b).to(dtype)


def plus_quotient(x: Tensor, a: Tensor, b: Tensor, *, value: Scalar = 1, dtype: torch.dtype) -> Tensor:
    return (x + value * a / b).to(dtype)


WITH_TENSORS: Mapping[Op, Callable[..., Tensor]] = {
    aten.mul.Tensor: product,
    aten.mul.Scalar: product,
    aten.div.Tensor: quotient,
    aten.div.Scalar: quotient,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Scalar: power,
    aten.add.Tensor: total,
    aten.add.Scalar: total,
    aten.sub.Tensor: difference,
    aten.sub.Scalar: difference,
    aten.lerp.Scalar: between,
    aten.addcmul.default: plus_product,
    aten.addcdiv.default: plus_quotient,
}
"""Operator that reads numbers → function that reads float64 tensors instead and casts the result to `dtype`."""
