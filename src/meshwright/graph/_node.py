"""Values and nodes: what a program is made of.

A node's `op` is an ATen operator, a step of a conversion (`Carry`), or a Python function on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from meshwright.layout import Spec, hint, identity
from meshwright.reshard import Plan, Purpose, Step
from meshwright.tensor import Context

from .torch_hooks import Operator

Phase = Literal["forward", "backward", "update"]
Kind = torch.dtype | type[int] | type[float] | type[bool]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What an input or a node gives: a tensor of this rank, or a Python number (`dtype` is int, float or bool).

    Two values are the same when they are one object. `shape` is that of the rank's part, and may hold symbolic sizes.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: Kind
    device: str = "cpu"

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.dtype, torch.dtype)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The shape, to be compared: symbolic sizes are equal when they are one expression, whatever they may be."""
        return tuple(map(identity, self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's part; symbolic sizes count by their hint."""
        if not isinstance(self.dtype, torch.dtype):
            return 0
        total = self.dtype.itemsize
        for n in self.shape:
            total *= hint(n)
        return total

    def __repr__(self) -> str:
        return f"%{self.name}"


def tensor_dtype(v: Value) -> torch.dtype:
    """The dtype of a value that is a tensor."""
    assert isinstance(v.dtype, torch.dtype)
    return v.dtype


@dataclass(frozen=True, slots=True)
class Carry:
    """A step of a conversion as an operator: of a tensor that lies as `src` says, on any rank."""

    step: Step
    src: Spec

    @property
    def dst(self) -> Spec:
        return self.step.apply(self.src)

    def of_part(self, shape: tuple[int, ...], purpose: Purpose | None = None) -> Plan:
        """The step as a plan, for a part of this shape: it tells what symbolic sizes are."""
        src = self.src.of_part(shape)
        return Plan(src, self.step.apply(src), (self.step,), purpose)

    @property
    def communicates(self) -> bool:
        return self.step.rounds(self.src) > 0

    def __repr__(self) -> str:
        return repr(self.step)


@dataclass(frozen=True, slots=True)
class Start:
    """A step that is begun: its value, of the form of the result, is under way until a `Wait` gives it."""

    carry: Carry

    def __repr__(self) -> str:
        return f"start {self.carry!r}"


@dataclass(frozen=True, slots=True)
class Wait:
    """The end of a step that was begun: of what `Start` gave, and of its operand, which must stay until then."""

    carry: Carry

    def __repr__(self) -> str:
        return f"wait for {self.carry!r}"


Place = int | str | tuple[int | str, int]
"""An argument: its place, its name, or one of either and the number in the list that it is."""


@dataclass(frozen=True, slots=True)
class OnCopy:
    """An operator that writes to its arguments `places`, as one that leaves them alone.

    It gives what `op` returns, and the written copies: `(result, copy, copy, ...)`.
    """

    op: Operator
    places: tuple[Place, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
class Over:
    """An operator that writes over its arguments `places` and returns nothing, as one that gives them.

    What it gives lies in the memory of what it was given; only the last passes make such nodes.
    """

    op: Operator
    places: tuple[int, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.op(*args, **kwargs)
        return args[self.places[0]] if len(self.places) == 1 else tuple(args[at] for at in self.places)

    def __repr__(self) -> str:
        return str(self.op)


Op = Operator | Carry | Start | Wait | OnCopy | Over | Callable[..., Any]


class Edge(NamedTuple):
    """A conversion from one chunk of a pipeline to another; `number` tells it from all others of the model.

    The chunk ALWAYS is what depends on no batch, and EVERYWHERE what lies on no mesh: each rank does it.
    """

    source: int
    target: int
    number: int


ALWAYS = -1
EVERYWHERE = -2


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: phase of the step, module path, the user's source line; and the modes it ran in.

    In a pipeline also the chunk of the model, the edge between chunks, and the slice of the sequence that it or its
    forward node belongs to.
    """

    phase: Phase = "forward"
    layer: str = ""
    where: str = ""
    grad: bool = True
    autocast: tuple[str, torch.dtype] | None = None
    context: Context = "gather"
    chunk: int | None = None
    edge: Edge | None = None
    slice: int = 0

    @property
    def purpose(self) -> Purpose:
        """What a conversion that comes from here is for."""
        return Purpose(self.phase, self.where, self.layer)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call: `out` has the form of what `op` returns, with values in the place of tensors and numbers.

    `ins` are the values that it reads, in order of appearance, repeated where they are; `outs` are those that it makes.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    out: Any = None
    origin: Origin = Origin()
    ins: tuple[Value, ...] = field(init=False, repr=False)
    outs: tuple[Value, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ins", tuple(values_in((self.args, self.kwargs))))
        object.__setattr__(self, "outs", tuple(values_in(self.out)))


def map_values(fn: Callable[[Value], Any], tree: Any) -> Any:
    """`tree` with every value in lists, tuples, dicts and slices replaced by `fn` of it."""
    if isinstance(tree, Value):
        return fn(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([map_values(fn, v) for v in tree])
    if isinstance(tree, dict):
        return {k: map_values(fn, v) for k, v in tree.items()}
    if isinstance(tree, slice):
        return slice(map_values(fn, tree.start), map_values(fn, tree.stop), map_values(fn, tree.step))
    return tree


def bind_values(shown: Any, made: Any, known: dict[Value, Any]) -> None:
    """Note in `known` what each value in the results of a node is, by results of the same form."""
    if isinstance(shown, Value):
        known[shown] = made
    elif isinstance(shown, (tuple, list)):
        for item, result in zip(shown, made, strict=True):
            bind_values(item, result, known)


def values_in(tree: Any) -> Iterator[Value]:
    """Every value in `tree`, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from values_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from values_in(item)
    elif isinstance(tree, slice):
        yield from values_in((tree.start, tree.stop, tree.step))


def name_of(op: Op) -> str:
    """Name of an operator in texts."""
    if isinstance(op, (Carry, Start, Wait, OnCopy, Over)):
        return repr(op)
    return str(op) if isinstance(op, Operator) else getattr(op, "__name__", repr(op))
