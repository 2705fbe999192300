"""Values and nodes, the elements of a program.

A node's `op` is an ATen operator, a step of a conversion (`Conversion`), or a Python function on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue, hint, identity
from meshwright.reshard import ConversionPlan, ConversionStep, Purpose
from meshwright.tensor import Context, leaves_in, map_leaves

from ..torch_hooks import Operator

Phase = Literal["forward", "backward", "update"]
Kind = torch.dtype | type[int] | type[float] | type[bool]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Result of a node, or an input: a tensor of this rank, or a Python number (`dtype` is int, float or bool).

    Values are compared by identity. `shape` is the local shape of the rank, and may contain symbolic sizes.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: Kind
    device: str = "cpu"

    @classmethod
    def of(cls, name: str, x: Tensor) -> Value:
        """Return a value with the shape, the dtype and the device of a tensor."""
        return cls(name, tuple(x.shape), x.dtype, str(x.device))

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.dtype, torch.dtype)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The shape in comparable form: symbolic sizes are equal if their expressions are equal."""
        return tuple(map(identity, self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor; symbolic sizes count by their hint."""
        if not isinstance(self.dtype, torch.dtype):
            return 0
        total = self.dtype.itemsize
        for n in self.shape:
            total *= hint(n)
        return total

    def __repr__(self) -> str:
        return f"%{self.name}"


def tensor_dtype(v: Value) -> torch.dtype:
    """Return the dtype of a value that must be a tensor."""
    assert isinstance(v.dtype, torch.dtype)
    return v.dtype


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion step as an operator on a tensor with the spec `src`, on any rank."""

    step: ConversionStep
    src: Spec

    @property
    def dst(self) -> Spec:
        return self.step.apply(self.src)

    def of_part(self, shape: tuple[int, ...], purpose: Purpose | None = None) -> ConversionPlan:
        """Return the step as a plan for a local tensor of this shape, which determines the symbolic sizes."""
        src = self.src.of_part(shape)
        return ConversionPlan(src, self.step.apply(src), (self.step,), purpose)

    @property
    def communicates(self) -> bool:
        return self.step.rounds(self.src) > 0

    def __repr__(self) -> str:
        return repr(self.step)


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a conversion step. Its value has the shape of the result and is in flight until `Wait` returns it."""

    carry: Conversion

    def __repr__(self) -> str:
        return f"start {self.carry!r}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Completion of a started step.

    The arguments are the value of `Start` and its operand, which must stay alive until then.
    """

    carry: Conversion

    def __repr__(self) -> str:
        return f"wait for {self.carry!r}"


ArgumentPosition = int | str | tuple[int | str, int]
"""Reference to an argument: position or name, or one of these and the index in a list argument."""


def argument_at(place: int | str, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]) -> TorchValue:
    """Return the argument at a position or of a name; None if the call does not have it."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


@dataclass(frozen=True, slots=True)
class WriteToCopies:
    """An operator that writes to its arguments `places`, applied to copies of them.

    It returns the result of `op` and the written copies: `(result, copy, copy, ...)`.
    """

    op: Operator
    places: tuple[ArgumentPosition, ...]

    def __call__(self, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        given = {key: list(value) if isinstance(value, (list, tuple)) else value for key, value in given.items()}
        copies: list[Any] = []
        for place in self.places:
            held, key = (given[place[0]], place[1]) if isinstance(place, tuple) else (given, place)
            held[key] = held[key].clone()
            copies.append(held[key])
        out = self.op(*[given[at] for at in range(len(args))], **{name: given[name] for name in kwargs})
        return (out, *copies)

    def __repr__(self) -> str:
        return f"{self.op} on copies"


@dataclass(frozen=True, slots=True)
class Overwrite:
    """An operator that overwrites its arguments `places`, as an operator that returns these arguments.

    The results share the memory of the arguments. Only the last passes create such nodes.
    """

    op: Operator
    places: tuple[int, ...]

    def __call__(self, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        self.op(*args, **kwargs)
        return args[self.places[0]] if len(self.places) == 1 else tuple(args[at] for at in self.places)

    def __repr__(self) -> str:
        return str(self.op)


Op = Operator | Conversion | Start | Wait | WriteToCopies | Overwrite | Callable[..., Any]


class ChunkConversion(NamedTuple):
    """A conversion from one chunk of a pipeline to another; `number` is unique in the model.

    The chunk ALWAYS holds nodes that depend on no batch. The chunk EVERYWHERE holds nodes on no mesh, which every rank
    runs.
    """

    source: int
    target: int
    number: int


ALWAYS = -1
EVERYWHERE = -2


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a node: phase of the step, module path, the user's source line, and the modes it ran in.

    In a pipeline, also the chunk of the model and the edge between chunks that the node or its forward node belongs to.
    """

    phase: Phase = "forward"
    layer: str = ""
    where: str = ""
    grad: bool = True
    autocast: tuple[str, torch.dtype] | None = None
    context: Context = "gather"
    chunk: int | None = None
    edge: ChunkConversion | None = None

    @property
    def purpose(self) -> Purpose:
        """The purpose of a conversion with this origin."""
        return Purpose(self.phase, self.where, self.layer)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call. `out` has the structure of the result of `op`, with values for tensors and numbers.

    `ins` are the read values in order of appearance, with repetitions; `outs` are the produced values.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    out: TorchValue = None
    origin: Origin = Origin()
    ins: tuple[Value, ...] = field(init=False, repr=False)
    outs: tuple[Value, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ins", tuple(values_in((self.args, self.kwargs))))
        object.__setattr__(self, "outs", tuple(values_in(self.out)))

    def mapped_arguments(self, fn: Callable[[Value], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with every value `v` replaced by `fn(v)`."""
        return map_values(fn, (self.args, dict(self.kwargs)))

    def with_operands(self, fn: Callable[[Value], Value]) -> Node:
        """Return the node with every value `v` among the arguments replaced by `fn(v)`."""
        args, kwargs = self.mapped_arguments(fn)
        return replace(self, args=args, kwargs=kwargs)


def map_values(fn: Callable[[Value], object], tree: TorchValue) -> TorchValue:
    """Return `tree` with every value `v` in it replaced by `fn(v)`."""
    return map_leaves(lambda x: fn(x) if isinstance(x, Value) else x, tree)


def bind_values(shown: TorchValue, made: TorchValue, known: dict[Value, Any]) -> None:
    """Store in `known` the result for each value in `shown`; `made` are results of the same structure."""
    if isinstance(shown, Value):
        known[shown] = made
    elif isinstance(shown, (tuple, list)):
        for item, result in zip(shown, made, strict=True):
            bind_values(item, result, known)


def values_in(tree: TorchValue) -> Iterator[Value]:
    """Return every value in `tree`, in order."""
    return (x for x in leaves_in(tree) if isinstance(x, Value))


def name_of(op: Op) -> str:
    """Return the name of an operator for texts."""
    if isinstance(op, (Conversion, Start, Wait, WriteToCopies, Overwrite)):
        return repr(op)
    return str(op) if isinstance(op, Operator) else getattr(op, "__name__", repr(op))
