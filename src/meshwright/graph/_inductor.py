"""Compiling a program's tensor operators into kernels through Inductor; what works on Python numbers stays as it is.

Communication is an operator of its own, which Inductor calls where it stands. Kernels are made for one rank: its
numbers are constants in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Arrival, Carrier, current

from ._execute import carrying, starting, to_fx
from ._node import Carry, Node, Start, Value, Wait, tensor_dtype
from ._program import Input, Program
from .torch_hooks import FakeMode, compile_graph

_CARRIED: list[Carry] = []
"""Steps that compiled programs carry out, by number."""
_CALLS: list[Callable[[Tensor], Tensor]] = []
_NUMBER_OF: dict[Carry, int] = {}


def number_of(op: Carry) -> int:
    """The number by which a compiled program calls the step."""
    if op not in _NUMBER_OF:
        _NUMBER_OF[op] = len(_CARRIED)
        _CARRIED.append(op)
        _CALLS.append(carrying(op))
    return _NUMBER_OF[op]


_LIBRARY = torch.library.Library("meshwright", "DEF")
"""Its operators are called with less ado than those of `torch.library.custom_op`."""
_LIBRARY.define("carry(Tensor x, int number) -> Tensor")
_LIBRARY.define("start(Tensor x, int number) -> Tensor")
_LIBRARY.define("wait(Tensor ticket, Tensor x, int number) -> Tensor")


def _carry(x: Tensor, number: int) -> Tensor:
    """Carries a step of a conversion out on the caller's carrier."""
    return _CALLS[number](x)


def _shown(x: Tensor, number: int) -> Tensor:
    return x.new_empty(current().local_shape(_CARRIED[number].dst))


_TICKETS = count(1)
_BEGUN: dict[int, Arrival] = {}
"""What is under way, by the number on its ticket."""


def _start(x: Tensor, number: int) -> Tensor:
    """Begins a step of a conversion; gives the ticket that `wait` takes."""
    ticket = next(_TICKETS)
    _BEGUN[ticket] = starting(_CARRIED[number])(x)
    return torch.tensor([ticket])


def _shown_ticket(x: Tensor, number: int) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="meta")


def _wait(ticket: Tensor, x: Tensor, number: int) -> Tensor:
    """What the step has given; `x` stays until then."""
    return _BEGUN.pop(int(ticket)).wait()


def _shown_later(ticket: Tensor, x: Tensor, number: int) -> Tensor:
    return _shown(x, number)


for _name, _real, _meta in (
    ("carry", _carry, _shown),
    ("start", _start, _shown_ticket),
    ("wait", _wait, _shown_later),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _meta, "Meta")


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Many nodes as one: a compiled function of the values that it reads."""

    call: Callable[..., Any]
    nodes: tuple[Node, ...]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __repr__(self) -> str:
        return f"kernels of {len(self.nodes)} operators"


Make = Callable[[Program, dict[Value, int]], Callable[..., Any]]
"""Gives a function for a part of a program, where some of its values are the numbers given."""


def compiled(
    program: Program, here: Carrier, options: dict[str, Any] | None = None, make: Make | None = None
) -> Program:
    """The program with the operators of its forward and backward pass as one call of compiled kernels.

    Nodes that read Python numbers which change from call to call, and those behind them, stay as they are. `make`
    gives other kernels than those that are compiled now.
    """
    rank_numbers = {i.value: i.source(here) for i in program.inputs if i.role == "number"}
    late = _later(program)
    region = [n for n in program.nodes if n not in late]
    if not region:
        return program
    inside = {v for n in region for v in n.outs}
    reads = [v for v in dict.fromkeys(v for n in region for v in n.ins) if v not in inside and v not in rank_numbers]
    read_later = {v for n in late for v in n.ins} | set(program.results)
    gives = [v for n in region for v in n.outs if v in read_later]
    part = Program(tuple(Input(v, "batch", v.name) for v in reads), tuple(region), tuple(gives), rank=program.rank)
    call = make(part, rank_numbers) if make is not None else _compile(part, rank_numbers, options or {})
    node = Node(Kernels(call, tuple(region)), tuple(reads), {}, tuple(gives), region[0].origin)
    rest = [n for n in program.nodes if n in late]
    return replace(program, nodes=(node, *rest))


def _later(program: Program) -> set[Node]:
    """The nodes that need a number which changes from call to call, or what comes from such nodes."""
    numbers = {i.value for i in program.inputs if i.role == "scalar"}
    found: set[Node] = set()
    for node in program.nodes:
        asks = any(not v.is_tensor for v in node.outs)
        if node.origin.phase == "update" or asks or any(v in numbers for v in node.ins):
            found.add(node)
            numbers.update(node.outs)
    return found


def _compile(part: Program, rank_numbers: dict[Value, int], options: dict[str, Any]) -> Callable[..., Any]:
    module = to_fx(part, _as_operator, rank_numbers, part.outputs)
    mode = FakeMode()
    with mode:
        examples = [torch.empty(i.value.shape, dtype=tensor_dtype(i.value), device=i.value.device) for i in part.inputs]
    return compile_graph(module, examples, options)


def _as_operator(op: Any) -> Callable[..., Any] | None:
    step = op.carry if isinstance(op, (Start, Wait)) else op
    if not isinstance(step, Carry) or not step.communicates:
        return None
    ours, number = torch.ops.meshwright, number_of(step)
    called = ours.start if isinstance(op, Start) else ours.wait if isinstance(op, Wait) else ours.carry

    def carry(*tensors: Tensor) -> Tensor:
        return called(*tensors, number)

    return carry
