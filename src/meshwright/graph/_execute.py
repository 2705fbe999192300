"""Running a program on a carrier, node by node: through Python code that torch.fx writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.comm import Arrival, current
from meshwright.reshard import AllReduce, Plan, Purpose

from ._effects import is_view
from ._memory import read_last
from ._node import Carry, Node, Start, Value, Wait, map_values
from ._program import Program

Run = Callable[..., tuple[Any, list[Any]]]
"""`run(*inputs)` gives the outputs, and the values that are written back, in the order of `program.writes`."""


def to_fx(
    program: Program,
    op_of: Callable[[Node], Callable[..., Any] | None] = lambda node: None,
    numbers: Mapping[Value, Any] | None = None,
    results: Any = None,
) -> fx.GraphModule:
    """The program as a torch.fx module: its results are the tuple (outputs, written values), or `results`.

    Inputs are placeholders in their order. `op_of` may give another function for a node, `numbers` the constants that
    some values are.
    """
    graph = fx.Graph()
    known: dict[Value, Any] = dict(numbers or {})
    for n, given in enumerate(program.inputs):
        known[given.value] = graph.placeholder(_identifier(n, given.value.name))
    for node in program.nodes:
        args, kwargs = map_values(lambda v: known[v], (tuple(node.args), dict(node.kwargs)))
        target = op_of(node) or _plainly(node.op, node.origin.purpose)
        made = graph.call_function(target, args, kwargs)
        _bind(graph, made, node.out, known)
    ends = results if results is not None else (program.outputs, [v for _, v in program.writes])
    graph.output(map_values(lambda v: known[v], ends))
    return fx.GraphModule({}, graph)


def _bind(graph: fx.Graph, made: fx.Node, out: Any, known: dict[Value, Any]) -> None:
    if isinstance(out, Value):
        known[out] = made
    elif isinstance(out, (tuple, list)):
        for at, item in enumerate(out):
            if item is not None:
                _bind(graph, graph.call_function(getitem, (made, at)), item, known)


def _identifier(n: int, name: str) -> str:
    """A name that no other input has, and no built-in: torch.fx gives such another, which an input may have already."""
    return f"x{n}_" + re.sub(r"\W", "_", name)


def _plainly(op: Any, purpose: Purpose) -> Callable[..., Any]:
    if isinstance(op, Start):
        return starting(op.carry, purpose)
    if isinstance(op, Wait):
        return _arrived
    if op is torch.ops.aten.view.default:  # a fake tensor may have other strides than the kernel's result
        return torch.ops.aten.reshape.default
    return carrying(op, purpose) if isinstance(op, Carry) else op if hasattr(op, "__name__") else _named(op)


def _named(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return call


def carrying(op: Carry, purpose: Purpose | None = None) -> Callable[[Tensor], Tensor]:
    """The step as a function of the caller's part, on whatever carrier the caller has."""
    ways: dict[Any, Plan] = {}

    def carry(x: Tensor) -> Tensor:
        key = x.shape if symbolic else None
        way = ways.get(key)
        if way is None:
            way = ways[key] = op.of_part(tuple(x.shape), purpose)
        return current().convert(way, x)

    symbolic = op.src.is_symbolic
    return carry


def reductions_over(program: Program) -> dict[Node, Carry]:
    """The all-reduces that may write over their operand: nobody reads it any more."""
    carried = {node: node.op for node in read_last(program) if isinstance(node.op, Carry)}
    return {node: op for node, op in carried.items() if isinstance(op.step, AllReduce)}


def reducing_over(op: Carry, purpose: Purpose | None = None) -> Callable[[Tensor], Tensor]:
    """The step as a function of the caller's part; where it is an all-reduce, perhaps in the part's own memory."""
    whole, step = carrying(op, purpose), op.step
    if not isinstance(step, AllReduce):
        return whole

    def reduce(x: Tensor) -> Tensor:
        here = current()
        if here.rank not in op.src.mesh:
            return whole(x)
        return here.all_reduce(x, step.op, step.group(way.src, here.rank), over=True)

    way = Plan(op.src, op.dst, (step,), purpose)
    return reduce


def starting(op: Carry, purpose: Purpose | None = None) -> Callable[[Tensor], Arrival]:
    """The beginning of the step as a function of the caller's part."""

    def start(x: Tensor) -> Arrival:
        return current().start(op.of_part(tuple(x.shape), purpose) if op.src.is_symbolic else way, x)

    way = Plan(op.src, op.dst, (op.step,), purpose)
    return start


def _arrived(started: Arrival, x: Tensor) -> Tensor:
    return started.wait()


def runner(program: Program) -> Run:
    """The program as a function of its inputs, in their order, for whatever carrier the caller has."""
    over, both = reductions_over(program), exchanged(program)
    module = to_fx(program, lambda node: reducing_over(over[node], node.origin.purpose) if node in over else None)

    def run(*inputs: Any) -> Any:
        with torch.no_grad():
            out, written = module(*inputs)
            for at in both:
                written[at] = written[at].clone()
            return out, written

    return run


def exchanged(program: Program) -> tuple[int, ...]:
    """The writes whose value looks at the memory of an input that is written over, too: buffers that change places."""
    written = {x for x, _ in program.writes}
    return tuple(at for at, (x, v) in enumerate(program.writes) if origin_of(program, v) in written - {x})


def origin_of(program: Program, v: Value) -> Value:
    """The value whose memory `v` may look at."""
    node = program.producers.get(v)
    while node is not None and is_view(node.op) and node.ins:
        v = node.ins[0]
        node = program.producers.get(v)
    return v
