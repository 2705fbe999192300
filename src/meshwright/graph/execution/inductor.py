"""Compilation of a program's tensor operators into kernels by Inductor. Operators on Python numbers are not compiled.

Communication is a custom operator, which Inductor calls in place. Kernels are compiled for one rank, whose numbers are
constants in them. A result that one rank does not need may be needed by another rank. So all communication writes to
one tensor, `order`: Inductor then neither removes nor reorders communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Communicator, current_communicator
from meshwright.layout import TorchValue, platform_of

from ..program.node import Conversion, Node, Start, Value, Wait, tensor_dtype, values_in
from ..program.program import Input, Program
from ..torch_hooks import FakeMode, compile_graph
from .all_reduce_grouping import group_all_reduces
from .fx_runner import origin_of, overwriting_step_function, reductions_over, start_function, step_function, to_fx
from .kernel_regions import Regions, regions
from .matrix_products import matmul
from .scatter_options import options_for

aten = torch.ops.aten
_CARRIED: list[Conversion] = []
"""Conversion steps that compiled programs call, by number."""
_CALLS: list[Callable[[Tensor], Tensor]] = []
_OVER: list[Callable[[Tensor], Tensor]] = []
_NUMBER_OF: dict[Conversion, int] = {}


def step_number(op: Conversion) -> int:
    """Return the number by which compiled programs call the step, after registering it if needed."""
    if op not in _NUMBER_OF:
        _NUMBER_OF[op] = len(_CARRIED)
        _CARRIED.append(op)
        _CALLS.append(step_function(op))
        _OVER.append(overwriting_step_function(op))
    return _NUMBER_OF[op]


_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
"""Library of the communication operators; its calls have less overhead than those of `torch.library.custom_op`."""
_LIBRARY.define("carry(Tensor x, Tensor(a!) order, int number) -> Tensor")
_LIBRARY.define("reduce_over(Tensor(a!) x, Tensor(b!) order, int number) -> ()")
_LIBRARY.define("start(Tensor x, Tensor(a!) order, int number, int ticket) -> ()")
_LIBRARY.define("wait(Tensor x, Tensor(a!) order, int number, int ticket) -> Tensor")


def _carry(x: Tensor, order: Tensor, number: int) -> Tensor:
    """Run a conversion step on the caller's communicator."""
    return _CALLS[number](x)


def _shape_of_result(x: Tensor, order: Tensor, number: int) -> Tensor:
    return x.new_empty(current_communicator().local_shape(_CARRIED[number].dst))


def _reduce_over(x: Tensor, order: Tensor, number: int) -> None:
    """Write the result of an all-reduce of `x` into `x`."""
    out = _OVER[number](x)
    if out.data_ptr() != x.data_ptr():
        x.copy_(out)


def _shape_of_nothing(x: Tensor, order: Tensor, number: int) -> None:
    return None


def _start(x: Tensor, order: Tensor, number: int, ticket: int) -> None:
    """Start a conversion step. `ticket` is the number by which `wait` finds it on the caller's communicator."""
    here = current_communicator()
    here.tickets[ticket] = start_function(_CARRIED[number])(x)


def _shape_of_started(x: Tensor, order: Tensor, number: int, ticket: int) -> None:
    return None


def _wait(x: Tensor, order: Tensor, number: int, ticket: int) -> Tensor:
    """Wait for the step and return its result. The argument `x` keeps the operand alive until then."""
    return current_communicator().tickets.pop(ticket).wait()


def _shape_of_waited(x: Tensor, order: Tensor, number: int, ticket: int) -> Tensor:
    return _shape_of_result(x, order, number)


for _name, _real, _meta in (
    ("carry", _carry, _shape_of_result),
    ("reduce_over", _reduce_over, _shape_of_nothing),
    ("start", _start, _shape_of_started),
    ("wait", _wait, _shape_of_waited),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _meta, "Meta")


@dataclass(frozen=True, slots=True, eq=False)
class CompiledKernels:
    """Operator for many nodes: a compiled function of the values that they read."""

    call: Callable[..., Any]
    nodes: tuple[Node, ...]

    def __call__(self, *args: TorchValue) -> TorchValue:
        return self.call(*args)

    def __repr__(self) -> str:
        return f"kernels of {len(self.nodes)} operators"


Write = tuple[Value, Value]
"""An input that a program writes to, and its value afterwards."""
Make = Callable[[Program, dict[Value, int]], Callable[..., Any]]
"""`make(part, numbers)` returns a function for a part of a program; `numbers` maps some of its values to constants."""


def compiled(
    program: Program,
    here: Communicator,
    options: dict[str, Any] | None = None,
    make: Make | None = None,
    writes: bool = True,
) -> Program:
    """Return the program with its tensor operators as one call of compiled kernels.

    Python numbers are computed before the call. Nodes that need numbers from kernels run after it (`regions`). Kernels
    write inputs in place if `writes` is True; it must be False if two inputs share memory. `make` supplies other
    kernels instead of compiling; these write to no input.
    """
    program = _with_late_sums(program)
    rank_numbers = {i.value: i.source(here) for i in program.inputs if i.role == "number"}
    parts = regions(program, rank_numbers)
    if not parts.kernels:
        return program
    written = _written_inside(program, parts) if writes and make is None else ()
    outside = tuple(pair for pair in program.writes if pair not in written)
    reads, gives = _reads(parts, written, rank_numbers), _results(program, parts, outside)
    part, ordered = _kernel_program(parts, written, reads, gives, program.rank)
    if make is not None:
        call = make(part, rank_numbers)
    else:
        call = _compile(part, rank_numbers, _overwriting(program, ordered), options or {}, len(written))
    if ordered:
        call = partial(call, torch.zeros((), dtype=torch.float32, device="cpu"))
    if parts.numbers:
        call = _packing(call, len(reads), torch.device(parts.packed.device))
    kernels = CompiledKernels(call, parts.kernels)
    node = Node(kernels, (*reads, *parts.numbers), {}, gives, parts.kernels[0].origin)
    return replace(program, nodes=(*parts.before, node, *parts.behind), writes=outside)


def _with_late_sums(program: Program) -> Program:
    """Return the program with its sums as late as possible, unless they run beside other work."""
    has_streams = platform_of(program.device).has_streams
    return program if has_streams else replace(program, nodes=group_all_reduces(program.nodes))


def _written_inside(program: Program, parts: Regions) -> tuple[Write, ...]:
    """Return the writes that kernels do: of inputs that no later node reads and no result shares memory with."""
    made = set(parts.made)
    read_behind = {v for n in parts.behind for v in n.ins}
    looked_at = {origin_of(program, v) for v in program.results} | read_behind
    return tuple((x, v) for x, v in program.writes if v in made and x not in looked_at)


def _reads(parts: Regions, written: Iterable[Write], known: Iterable[Value]) -> tuple[Value, ...]:
    """Return the values that kernels read or write to, without their own, the packed numbers, and constants."""
    read = [*(v for n in parts.kernels for v in n.ins), *(x for x, _ in written)]
    others = {*parts.made, *known, parts.packed}
    return tuple(v for v in dict.fromkeys(read) if v not in others)


def _results(program: Program, parts: Regions, outside: Iterable[Write]) -> tuple[Value, ...]:
    """Return the values of kernels that later nodes, outputs or writes `outside` of the kernels read."""
    read = {v for n in parts.behind for v in n.ins} | {*values_in(program.outputs), *(v for _, v in outside)}
    return tuple(v for v in parts.made if v in read)


def _kernel_program(
    parts: Regions, written: Iterable[Write], reads: Iterable[Value], gives: tuple[Value, ...], rank: int
) -> tuple[Program, Mapping[Node, Node]]:
    """Return the program that becomes kernels, and its communicating nodes by the nodes that they stand for.

    The inputs are `order` if a node communicates, the values that kernels read, and the packed numbers if any.
    The last nodes are the writes.
    """
    order = Value("order", (), torch.float32)  # a number may be on the CPU beside tensors on a device
    ordered = {node: replace(node, args=(*node.args, order)) for node in parts.kernels if _carried(node)}
    taken = [*([order] if ordered else []), *reads, *([parts.packed] if parts.numbers else [])]
    copies = [Node(aten.copy_.default, (x, v), {}, Value(f"{x.name}_written", x.shape, x.dtype)) for x, v in written]
    nodes = (*(ordered.get(node, node) for node in parts.kernels), *copies)
    return Program(tuple(Input(v, "batch", v.name) for v in taken), nodes, gives, rank=rank), ordered


def _overwriting(program: Program, ordered: Mapping[Node, Node]) -> set[Node]:
    """Return the all-reduces of kernels that may overwrite their operand."""
    return {ordered[node] for node in reductions_over(program) if node in ordered}


def _carried(node: Node) -> Conversion | None:
    """Return the step that the node runs, starts or waits for, if it communicates."""
    step = node.op.carry if isinstance(node.op, (Start, Wait)) else node.op
    return step if isinstance(step, Conversion) and step.communicates else None


def _packing(call: Callable[..., Any], tensors: int, device: torch.device) -> Callable[..., Any]:
    """Return a function that packs the numbers after the first `tensors` arguments into one tensor for `call`.

    Kernels of a device cannot read memory of the host. The copy from pinned memory does not make the host wait.
    """
    pinned = platform_of(device).pins_memory

    def packing(*args: TorchValue) -> TorchValue:
        packed = torch.tensor(args[tensors:], dtype=torch.float64, device="cpu", pin_memory=pinned)
        return call(*args[:tensors], packed.to(device, non_blocking=True))

    return packing


def _compile(
    part: Program, rank_numbers: dict[Value, int], over: set[Node], options: dict[str, Any], written: int
) -> Callable[..., Any]:
    tickets = _ticket_numbers(part)
    module = to_fx(part, lambda node: _as_operator(node, node in over, tickets), rank_numbers, part.outputs)
    with FakeMode():
        examples = [torch.empty(i.value.shape, dtype=tensor_dtype(i.value), device=i.value.device) for i in part.inputs]
    at = {i.value: n for n, i in enumerate(part.inputs)}
    options = {**options_for(part), **options}
    return compile_graph(module, examples, options, [at[n.args[0]] for n in part.nodes[len(part.nodes) - written :]])


def _ticket_numbers(part: Program) -> Mapping[Value, int]:
    """Return a number for each value in flight. Programs of a rank run one after the other, and may use the same."""
    return {node.out: at for at, node in enumerate(n for n in part.nodes if isinstance(n.op, Start))}


def _as_operator(node: Node, over: bool, tickets: Mapping[Value, int]) -> Callable[..., Any] | None:
    if node.op is aten.mm.default:
        return matmul
    step = _carried(node)
    if step is None:
        return None
    ours, number = torch.ops.meshwright, step_number(step)
    if isinstance(node.op, Start):
        ticket = tickets[node.out]
        return lambda x, order: ours.start(x, order, number, ticket)
    if isinstance(node.op, Wait):
        ticket = tickets[node.args[0]]
        return lambda started, x, order: ours.wait(x, order, number, ticket)
    if not over:
        return lambda x, order: ours.carry(x, order, number)

    def reduce(x: Tensor, order: Tensor) -> Tensor:
        ours.reduce_over(x, order, number)
        return x

    return reduce
