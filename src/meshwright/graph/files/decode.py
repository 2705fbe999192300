"""Decoder from JSON data to a program. It looks up every name and checks every number that `encode.py` wrote.

Nothing is evaluated. Operators must be in `torch.ops` and admitted by `admitted_operators.py`; Python functions must be
in a table. Anything else raises DataError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from meshwright.layout import Dim, JsonValue, Layout, ProcessMesh, Product, Spec, TorchValue, evenly
from meshwright.reshard import ConversionStep, Exchange, View, parse_step
from meshwright.tensor import Context, ReshardMark

from ..program.node import Conversion, Kind, Node, Op, Origin, Overwrite, Phase, Start, Value, Wait, WriteToCopies
from ..program.program import Change, Input, Program, Role
from ..program.rank_numbers import Length, Offset, RankPlace
from ..recording.dynamic_sizes import BatchSize
from ..recording.size_expressions import evaluate_rows
from ..recording.symbolic_numbers import FUNCTIONS
from ..torch_hooks import Operator, named_symbol, new_sizes
from .admitted_operators import is_admitted
from .encode import FORMAT

T = TypeVar("T")

MOST = 2**62
"""Exclusive upper bound of the absolute value of numbers in a file."""
MOST_SYMBOLS = 1000
MOST_RANKS = 2**20


class DataError(ValueError):
    """Error for data that is not a program."""


@dataclass(slots=True)
class Decoder:
    """Decoder of one program, with its tables. `tensors` are the program's constants by name.

    `operators` are the operators of other libraries that the program may name.
    """

    tensors: Mapping[str, Tensor]
    operators: Collection[str] = ()
    numbers: dict[str, TorchValue] = field(default_factory=dict[str, Any])
    meshes: list[ProcessMesh] = field(default_factory=list[ProcessMesh])
    specs: list[Spec] = field(default_factory=list[Spec])
    values: list[Value] = field(default_factory=list[Value])

    def program(self, data: JsonValue) -> Program:
        """Return the program that the data describes.

        Raises DataError, or a Python error (LookupError, TypeError, ...) for data of another structure.
        """
        if number(data["format"]) > FORMAT:
            raise DataError(f"it has format {data['format']}, but this version reads formats up to {FORMAT}")
        self.numbers = evaluate_rows(data["sizes"], self._symbols(data["symbols"]))
        self.read_specs(data)
        self.values = [self._value(*row) for row in data["values"]]
        origins = [_origin(*row) for row in data["origins"]]
        return Program(
            tuple(self._input(*row) for row in data["inputs"]),
            tuple(self._node(origins, *row) for row in data["nodes"]),
            self.tree(data["outputs"]),
            tuple((self._value_at(x), self._value_at(v)) for x, v in data["writes"]),
            tuple(_change(*row) for row in data["changes"]),
            number(data["rank"]),
            {self._value_at(v): item(self.specs, spec) for v, spec in data["lies"]},
        )

    def read_specs(self, data: JsonValue) -> list[Spec]:
        """Return the specs of the data after reading its meshes."""
        if (ranks := sum(prod(map(number, row(shape))) for shape, *_ in data["meshes"])) > MOST_RANKS:
            raise DataError(f"its meshes have {ranks} ranks together, but a program may have at most {MOST_RANKS}")
        self.meshes = [_mesh(*each) for each in data["meshes"]]
        self.specs = [self._spec(*row) for row in data["specs"]]
        return self.specs

    def _symbols(self, rows: Mapping[str, JsonValue]) -> dict[str, Any]:
        if len(rows) > MOST_SYMBOLS:
            raise DataError(f"it has {len(rows)} symbols, more than the limit")
        world = new_sizes()
        return {text(name): named_symbol(world, name, *_symbol(*facts)) for name, facts in rows.items()}

    def size(self, n: JsonValue) -> int:
        return self.numbers[n] if isinstance(n, str) else number(n)

    def _spec(
        self, mesh: JsonValue, dtype: JsonValue, sizes: JsonValue, layout: JsonValue, strides: JsonValue = None
    ) -> Spec:
        kind = _dtype_named(dtype)
        if not isinstance(kind, torch.dtype):
            raise DataError(f"a spec has the dtype {dtype!r}")
        shape = [self.size(n) for n in row(sizes)]
        steps = None if strides is None else [self.size(n) for n in row(strides)]
        if steps is not None and len(steps) != len(shape):
            raise DataError(f"a spec has {len(shape)} sizes and {len(steps)} strides")
        return Spec(item(self.meshes, mesh), self._layout(layout), shape, kind, steps)

    def _layout(self, data: JsonValue) -> Layout:
        dims, partial, varying = row(data)
        return Layout(tuple(map(self._dim, row(dims))), tuple((text(a), text(op)) for a, op in partial), texts(varying))

    def _dim(self, data: JsonValue) -> Dim:
        if isinstance(data, dict):
            return Product(tuple((self.size(n), texts(axes)) for n, axes in data["product"]))
        return texts(data)

    def _value(self, name: JsonValue, dtype: JsonValue, sizes: JsonValue, device: JsonValue) -> Value:
        torch.device(text(device))
        return Value(text(name), tuple(self.size(n) for n in row(sizes)), _dtype_named(dtype), device)

    def _value_at(self, n: JsonValue) -> Value:
        return item(self.values, n)

    def _input(
        self,
        value: JsonValue,
        role: JsonValue,
        name: JsonValue,
        spec: JsonValue,
        source: JsonValue,
        first: JsonValue = None,
        frozen: JsonValue = False,
    ) -> Input:
        v, where = self._value_at(value), self.tree(source)
        if not _SOURCES[one_of(Role, role)](where):
            raise DataError(f"the source of the input {name!r} is unknown")
        if first is not None and (role != "state" or not isinstance(first, (int, float)) or not v.is_tensor):
            raise DataError(f"the input {name!r} is filled with {first!r}")
        if type(frozen) is not bool or (frozen and role != "parameter"):
            raise DataError(f"the input {name!r} is frozen: {frozen!r}")
        if isinstance(where, Tensor):
            if (tuple(where.shape), where.dtype) != (v.shape, v.dtype):
                raise DataError(f"the constant {v!r} is a tensor of shape {tuple(where.shape)} and dtype {where.dtype}")
            where = where.to(v.device)
        return Input(v, role, text(name), None if spec is None else item(self.specs, spec), where, first, frozen)

    def _node(
        self,
        origins: list[Origin],
        op: JsonValue,
        args: JsonValue,
        kwargs: JsonValue,
        out: JsonValue,
        origin: JsonValue,
    ) -> Node:
        given = {text(k): self.tree(v) for k, v in kwargs.items()}
        node = Node(self._op(op), tuple(self.tree(row(args))), given, self.tree(out), item(origins, origin))
        tensors = _TENSOR_ARGUMENTS.get(type(node.op))
        if tensors is not None and (len(node.args) != tensors or not all(map(_is_value, (*node.args, node.out)))):
            raise DataError(f"{node.op!r} must take {tensors} tensors and return a tensor")
        return node

    def _op(self, data: JsonValue) -> Op:
        kind, what = only(data)
        if kind == "op":
            return self._operator(what)
        if kind == "python":
            return FUNCTIONS[what]
        first, second = row(what)
        if kind in _CARRIED:
            return _CARRIED[kind](self._carry(self._step(first), item(self.specs, second)))
        if kind == "mark":
            return ReshardMark(item(self.meshes, first), self._layout(second))
        if kind == "on copy":
            return WriteToCopies(self._operator(first), tuple(self.tree(row(second))))
        if kind == "over":
            return Overwrite(self._operator(first), tuple(number(n) for n in row(second)))
        raise DataError(f"unknown kind of operator {kind!r}")

    def _operator(self, name: JsonValue) -> Operator:
        found = operator_named(name)
        if not is_admitted(found, self.operators):
            raise DataError(
                f"it names the operator {name!r}, which is not known to be a function of tensors only; "
                "for an operator of another library, name it in load(folder, operators=[...])"
            )
        return found

    def _carry(self, step: ConversionStep, src: Spec) -> Conversion:
        op = Conversion(step, src)
        if op.dst.dtype != src.dtype:
            raise DataError(f"{op!r} returns {op.dst!r} for {src!r}")
        return op

    def _step(self, data: JsonValue) -> ConversionStep:
        if isinstance(data, str):
            return parse_step(data)
        kind, spec = only(data)
        return {"View": View, "Exchange": Exchange}[kind](item(self.specs, spec))

    def tree(self, x: JsonValue) -> TorchValue:
        """Return the decoded form of an argument, a result or the source of an input."""
        if isinstance(x, list):
            return [self.tree(v) for v in x]
        if not isinstance(x, dict):
            return x
        kind, what = only(x)
        if kind not in _READERS:
            raise DataError(f"unknown kind of argument {kind!r}")
        return _READERS[kind](self, what)

    def _tensor(self, name: JsonValue) -> Tensor:
        return self.tensors[text(name)]

    def _meta_tensor(self, sizes: JsonValue, dtype: JsonValue) -> Tensor:
        return torch.empty([self.size(n) for n in row(sizes)], dtype=torch_name(torch.dtype, dtype), device="meta")


_TENSOR_ARGUMENTS: Mapping[type, int] = {Conversion: 1, Start: 1, Wait: 2}
"""Operator that communicates → number of its arguments, which are tensors."""


def _is_value(x: object) -> bool:
    return isinstance(x, Value) and x.is_tensor


def _is_nothing(x: object) -> bool:
    return x is None


_SOURCES: dict[Role, Callable[[Any], bool]] = {
    "saved": _is_nothing,
    "parameter": _is_nothing,
    "gradient": _is_nothing,
    "buffer": _is_nothing,
    "state": lambda x: isinstance(x, tuple) and all(isinstance(part, str) for part in x),
    "batch": lambda x: type(x) is int,
    "constant": lambda x: isinstance(x, Tensor),
    "scalar": lambda x: x is not None and not isinstance(x, Tensor),
    "number": lambda x: isinstance(x, (Length, Offset, RankPlace)),
    "size": lambda x: isinstance(x, BatchSize),
}
"""Role of an input → predicate that is True for a valid source of this role."""


def operator_named(name: JsonValue) -> Operator:
    """Return the operator of `torch.ops` with a name such as `aten.mm.default`. Raises DataError if there is none."""
    parts = text(name).split(".")
    found: object = torch.ops
    kinds = (type(torch.ops.aten), type(torch.ops.aten.add), Operator)
    if len(parts) != len(kinds):
        raise DataError(f"{name!r} is not the name of an overload")
    for part, kind in zip(parts, kinds, strict=True):
        found = getattr(found, part, None)
        if not isinstance(found, kind):
            raise DataError(f"torch.ops has no operator {name!r}: import the library that registers it")
    operator: JsonValue = found
    return operator


def number(n: JsonValue, least: int | None = 0) -> int:
    """Return `n`. Raises DataError if `n` is no int, below `least` (None: no lower bound), or not smaller than MOST."""
    if type(n) is not int or not (least is None or n >= least) or abs(n) >= MOST:
        raise DataError(f"{n!r} is not a valid number here")
    return n


def text(x: JsonValue) -> str:
    if not isinstance(x, str):
        raise DataError(f"{x!r} is not a string")
    return x


def texts(x: JsonValue) -> tuple[str, ...]:
    return tuple(map(text, row(x)))


def row(x: JsonValue) -> list[JsonValue]:
    if not isinstance(x, list):
        raise DataError(f"{x!r} is not a list")
    return x


def item(table: Sequence[T], at: JsonValue) -> T:
    return table[number(at)]


def only(x: JsonValue) -> tuple[str, JsonValue]:
    """Return the only key of an object and its value."""
    ((kind, what),) = x.items()
    return kind, what


def one_of(names: object, name: JsonValue) -> JsonValue:
    if name not in get_args(names):
        raise DataError(f"{name!r} is none of {', '.join(get_args(names))}")
    return name


def torch_name(kind: type[T], name: JsonValue) -> T:
    """Return `torch.<name>`. Raises DataError if it is not an instance of `kind`."""
    found = getattr(torch, text(name), None)
    if not isinstance(found, kind):
        raise DataError(f"torch.{name} is not a {kind.__name__}")
    return found


def _symbol(kind: JsonValue, hint: JsonValue) -> tuple[str, Any]:
    least = {"size": 2, "number": -MOST}
    if kind == "found":
        return kind, None
    return kind, number(hint, least[kind])


def _dtype_named(name: JsonValue) -> Kind:
    numbers: dict[str, Kind] = {"python int": int, "python float": float, "python bool": bool}
    return numbers[name] if name in numbers else torch_name(torch.dtype, name)


def _mesh(shape: JsonValue, ranks: JsonValue, names: JsonValue) -> ProcessMesh:
    """Return the mesh. `ranks` lists all ranks, or holds the first rank and the rank step of each dim."""
    sizes = [number(n) for n in row(shape)]
    if prod(sizes) > MOST_RANKS or min(sizes, default=0) < 1:
        raise DataError(f"a mesh cannot have the shape {sizes}")
    if len(row(ranks)) == 2 and isinstance(ranks[1], list):
        return ProcessMesh(evenly(number(ranks[0]), [number(n, None) for n in ranks[1]], sizes), texts(names))
    return ProcessMesh(np.array([number(r) for r in ranks]).reshape(sizes), texts(names))


def _origin(
    phase: JsonValue,
    layer: JsonValue,
    where: JsonValue,
    grad: JsonValue,
    cast: JsonValue,
    context: JsonValue = "gather",
) -> Origin:
    modes = None if cast is None else (text(cast[0]), torch_name(torch.dtype, cast[1]))
    return Origin(one_of(Phase, phase), text(layer), text(where), grad is True, modes, one_of(Context, context))


def _change(by: JsonValue, what: JsonValue, where: JsonValue, saved: JsonValue) -> Change:
    amounts = {text(unit): float(n) for unit, n in saved.items()}
    return Change(text(by), text(what), text(where), {u: int(n) if n.is_integer() else n for u, n in amounts.items()})


def _identity(op: Conversion) -> Conversion:
    return op


_CARRIED: dict[str, Callable[[Conversion], Op]] = {"carry": _identity, "start": Start, "wait": Wait}


def _dict_of_pairs(decoder: Decoder, what: Iterable[JsonValue]) -> dict[TorchValue, TorchValue]:
    return {decoder.tree(k): decoder.tree(v) for k, v in what}


def _torch_reader(kind: type[T]) -> Callable[[Decoder, JsonValue], T]:
    return lambda decoder, what: torch_name(kind, what)


_READERS: dict[str, Callable[[Decoder, JsonValue], TorchValue]] = {
    "%": lambda decoder, what: decoder._value_at(what),
    "()": lambda decoder, what: tuple(decoder.tree(row(what))),
    "{}": _dict_of_pairs,
    "slice": lambda decoder, what: slice(*decoder.tree(row(what))),
    "float": lambda decoder, what: float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[what]),
    "complex": lambda decoder, what: complex(*decoder.tree(row(what))),
    "Size": lambda decoder, what: torch.Size([number(n) for n in row(what)]),
    "dtype": _torch_reader(torch.dtype),
    "layout": _torch_reader(torch.layout),
    "memory_format": _torch_reader(torch.memory_format),
    "device": lambda decoder, what: torch.device(text(what)),
    "tensor": lambda decoder, what: decoder._tensor(what),
    "meta": lambda decoder, what: decoder._meta_tensor(*what),
    "BatchSize": lambda decoder, what: BatchSize(number(what[0]), number(what[1]), number(what[2], 1)),
    "Length": lambda decoder, what: Length(item(decoder.specs, what[0]), number(what[1])),
    "Offset": lambda decoder, what: Offset(item(decoder.specs, what[0]), number(what[1])),
    "RankPlace": lambda decoder, what: RankPlace(item(decoder.meshes, what[0]), texts(what[1])),
}
