"""Encoder from a program to JSON data: tables of values, specs, meshes and sizes, and nodes that refer to them.

Arguments are trees. Numbers, strings, None and lists are written as they are. Anything else is an object with one key,
which names its kind: `{"%": 3}` is value 3, `{"dtype": "float32"}` is a dtype. `decode.py` reads this data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import JsonValue, Layout, ProcessMesh, Product, Spec, TorchValue
from meshwright.reshard import ConversionStep, Exchange, ReshardError, View, parse_step
from meshwright.tensor import DistTensor, ReshardMark

from .._errors import ProgramFileError
from ..program.node import Conversion, Kind, Node, Origin, Overwrite, Start, Value, Wait, WriteToCopies, name_of
from ..program.node_text import node_text
from ..program.program import Input, Program
from ..program.rank_numbers import Length, Offset, RankPlace
from ..recording.dynamic_sizes import BatchSize
from ..recording.size_expressions import ExpressionError, Rows
from ..recording.symbolic_numbers import FUNCTIONS
from ..torch_hooks import Operator, ShapeEnv, known_hint

FORMAT = 4
"""Version of the written format. Programs of this version and of earlier ones can be read."""

FunctionNames = Mapping[Callable[..., Any], str]
FUNCTION_NAMES: FunctionNames = {fn: name for name, fn in reversed(FUNCTIONS.items())}
"""Python function on numbers → its name in files."""


@dataclass(slots=True)
class Encoder:
    """Encoder of one program, with its tables. `tensors` are the program's constants by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    symbols: dict[str, tuple[Any, str, int | None]] = field(default_factory=dict[str, tuple[Any, str, int | None]])
    sizes: Rows = field(default_factory=lambda: Rows(str))
    meshes: dict[ProcessMesh, int] = field(default_factory=dict[ProcessMesh, int])
    specs: dict[Spec, int] = field(default_factory=dict[Spec, int])
    origins: dict[Origin, int] = field(default_factory=dict[Origin, int])
    values: dict[Value, int] = field(default_factory=dict[Value, int])
    spec_rows: list[JsonValue] = field(default_factory=list[JsonValue])
    value_rows: list[JsonValue] = field(default_factory=list[JsonValue])

    def program(self, program: Program) -> dict[str, JsonValue]:
        """Return the program as plain data. Raises ProgramFileError with the name of the part that cannot be saved."""
        inputs = [self._input(i) for i in program.inputs]
        nodes = [self._node(node) for node in program.nodes]
        with _naming_place("the results of the program"):
            ends = {
                "outputs": self.tree(program.outputs),
                "writes": [[self.values[x], self.values[v]] for x, v in program.writes],
                "lies": [[self.values[v], self.spec(s)] for v, s in program.specs.items() if v in self.values],
                "changes": [[c.by, c.what, c.where, dict(c.saved)] for c in program.changes],
            }
        return {
            "format": FORMAT,
            "torch": torch.__version__,
            "rank": program.rank,
            "symbols": {name: [kind, hint] for name, (_, kind, hint) in self.symbols.items()},
            "sizes": self.sizes.rows,
            "meshes": self.mesh_rows,
            "specs": self.spec_rows,
            "origins": [_origin(o) for o in self.origins],
            "values": self.value_rows,
            "inputs": inputs,
            "nodes": nodes,
            **ends,
        }

    @property
    def mesh_rows(self) -> list[JsonValue]:
        """Shape, ranks and dim names of each mesh. Evenly spaced ranks are written as the first rank and the steps."""
        ranks = [[m.steps[0], list(m.steps[1])] if m.steps else list(m.process_ids) for m in self.meshes]
        return [[list(m.shape), found, list(m.dim_names)] for m, found in zip(self.meshes, ranks, strict=True)]

    def _input(self, given: Input) -> list[JsonValue]:
        with _naming_place(f"the input {given.name}"):
            spec = None if given.spec is None else self.spec(given.spec)
            row = [self._add_value(given.value), given.role, given.name, spec, self.tree(given.source), given.first]
            return [*row, True] if given.frozen else row

    def _node(self, node: Node) -> list[JsonValue]:
        with _naming_place(node):
            args, kwargs = self.tree(list(node.args)), {k: self.tree(v) for k, v in node.kwargs.items()}
            for v in node.outs:
                self._add_value(v)
            origin = self.origins.setdefault(node.origin, len(self.origins))
            return [self._op(node), args, kwargs, self.tree(node.out), origin]

    def _add_value(self, v: Value) -> int:
        """Add a new value to the table and return its number."""
        self.values[v] = at = len(self.value_rows)
        self.value_rows.append([v.name, kind_text(v.dtype), [self.size(n) for n in v.shape], v.device])
        return at

    def _op(self, node: Node) -> dict[str, JsonValue]:
        op = node.op
        if isinstance(op, Operator):
            return {"op": str(op)}
        if isinstance(op, (Conversion, Start, Wait)):
            carry = op if isinstance(op, Conversion) else op.carry
            kind = "carry" if op is carry else type(op).__name__.lower()
            return {kind: [self._step(carry.step), self.spec(carry.src)]}
        if isinstance(op, (WriteToCopies, Overwrite)):
            return {"over" if isinstance(op, Overwrite) else "on copy": [str(op.op), self.tree(list(op.places))]}
        if isinstance(op, ReshardMark):
            return {"mark": [self._mesh(op.mesh), self._layout(op.layout)]}
        if op in FUNCTION_NAMES:
            return {"python": FUNCTION_NAMES[op]}
        raise _UnknownError(f"{name_of(op)} is a {type(op).__name__}, Python code that only this process has")

    def _step(self, step: ConversionStep) -> JsonValue:
        if isinstance(step, (View, Exchange)):
            return {type(step).__name__: self.spec(step.to)}
        try:
            if parse_step(repr(step)) == step:
                return repr(step)
        except ReshardError:
            pass
        raise _UnknownError(f"the step {step!r} has no text that parses back")

    def spec(self, spec: Spec) -> int:
        """Return the number of the spec in its table, after adding it if needed."""
        found = self.specs.get(spec)
        if found is None:
            sizes = [self.size(n) for n in spec.shape]
            strides = None if spec.strides is None else [self.size(n) for n in spec.strides]
            row = [self._mesh(spec.mesh), kind_text(spec.dtype), sizes, self._layout(spec.layout), strides]
            self.specs[spec] = found = len(self.spec_rows)
            self.spec_rows.append(row)
        return found

    def _mesh(self, mesh: ProcessMesh) -> int:
        return self.meshes.setdefault(mesh, len(self.meshes))

    def _layout(self, layout: Layout) -> list[JsonValue]:
        dims = [
            {"product": [[self.size(n), list(axes)] for n, axes in d.factors]} if isinstance(d, Product) else list(d)
            for d in layout.dims
        ]
        return [dims, [list(term) for term in layout.partial], list(layout.varying)]

    def size(self, n: int | torch.SymInt) -> int | float | str:
        """Return a number, or the name of the row that computes it."""
        if isinstance(n, int):
            return int(n)
        for symbol in n.node.expr.free_symbols:
            self._symbol(symbol, n.node.shape_env)
        return self.sizes.of(n.node.expr)

    def _symbol(self, symbol: TorchValue, world: ShapeEnv) -> None:
        hint = known_hint(symbol, world)
        kind = "size" if symbol.is_positive else "number"
        if hint is None:
            kind = "found"
        if self.symbols.setdefault(str(symbol), (world, kind, hint))[0] is not world:
            raise ExpressionError(f"two symbols are called {symbol}")

    def tree(self, x: TorchValue) -> JsonValue:
        """Return the encoded form of an argument, a result or the source of an input."""
        if x is None or type(x) in (bool, int, str):
            return x
        if type(x) is list:
            return [self.tree(v) for v in x]
        if isinstance(x, Value):
            return {"%": self.values[x]}
        write = _WRITERS.get(type(x))
        if write is None:
            raise _UnknownError(f"{_shortened(x)} is a {type(x).__name__}")
        return write(self, x)

    def _tensor(self, x: Tensor) -> JsonValue:
        if x.is_meta:  # for a tensor of other ranks, only the shape is known
            return {"meta": [[self.size(n) for n in x.shape], kind_text(x.dtype)]}
        name = f"constant_{len(self.tensors)}"
        self.tensors[name] = x.detach().cpu().contiguous().clone()
        return {"tensor": name}


def program_data(program: Program) -> tuple[dict[str, JsonValue], dict[str, Tensor]]:
    """Return the program as JSON data, and its constants by name. Raises ProgramFileError if a part cannot be saved."""
    encoder = Encoder()
    return encoder.program(program), encoder.tensors


class _UnknownError(Exception):
    """Error for an object that has no representation in a file."""


@contextmanager
def _naming_place(part: Node | str) -> Generator[None]:
    """Convert errors for unrepresentable objects inside the context to ProgramFileError, with `part` as the place."""
    try:
        yield
    except (_UnknownError, ExpressionError) as error:
        raise ProgramFileError(
            "saving a program",
            node_text(part, where=True) if isinstance(part, Node) else part,
            str(error),
            "operators of torch.ops in its place (torch.library.custom_op makes one of a function), and the program "
            "as it is before kernels are compiled",
        ) from None


def kind_text(kind: Kind) -> str:
    """Return the torch name of a dtype, or `python int` (`float`, `bool`) for the type of a Python number."""
    return str(kind).removeprefix("torch.") if isinstance(kind, torch.dtype) else f"python {kind.__name__}"


def _origin(origin: Origin) -> list[JsonValue]:
    cast = origin.autocast
    return [
        origin.phase,
        origin.layer,
        origin.where,
        origin.grad,
        None if cast is None else [cast[0], kind_text(cast[1])],
        origin.context,
    ]


def _write_float(encoder: Encoder, x: float) -> JsonValue:
    return x if math.isfinite(x) else {"float": repr(x)}


def _write_numbers(tag: str) -> Callable[[Encoder, TorchValue], JsonValue]:
    return lambda encoder, x: {tag: [int(n) for n in x]}


def _write_name(tag: str) -> Callable[[Encoder, TorchValue], JsonValue]:
    return lambda encoder, x: {tag: str(x).removeprefix("torch.")}


_WRITERS: dict[type, Callable[[Encoder, TorchValue], JsonValue]] = {
    float: _write_float,
    complex: lambda encoder, x: {"complex": [encoder.tree(x.real), encoder.tree(x.imag)]},
    tuple: lambda encoder, x: {"()": [encoder.tree(v) for v in x]},
    dict: lambda encoder, x: {"{}": [[encoder.tree(k), encoder.tree(v)] for k, v in x.items()]},
    slice: lambda encoder, x: {"slice": [encoder.tree(v) for v in (x.start, x.stop, x.step)]},
    torch.Size: _write_numbers("Size"),
    torch.dtype: _write_name("dtype"),
    torch.device: _write_name("device"),
    torch.layout: _write_name("layout"),
    torch.memory_format: _write_name("memory_format"),
    Tensor: lambda encoder, x: encoder._tensor(x),
    BatchSize: lambda encoder, x: {"BatchSize": [x.leaf, x.dim, x.ranks]},
    Length: lambda encoder, x: {"Length": [encoder.spec(x.spec), x.dim]},
    Offset: lambda encoder, x: {"Offset": [encoder.spec(x.spec), x.dim]},
    RankPlace: lambda encoder, x: {"RankPlace": [encoder._mesh(x.mesh), list(x.axes)]},
}


def _shortened(x: object) -> str:
    text = f"a distributed tensor {x.spec!r}" if isinstance(x, DistTensor) else repr(x)
    return text if len(text) < 80 else text[:77] + "..."
