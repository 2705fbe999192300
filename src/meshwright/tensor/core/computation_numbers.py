"""Numbers for the computations that made a tensor, equal on all ranks that run the same program.

A tensor made from a plain one has the number of the line that made it. The number of a call's result is a hash of the
function, its distributed operands and its plain numbers. The collectives of a call have that number too, also in the
backward pass. So ranks that run their operators in another order detect it before they exchange wrong values
(`comm.call_purpose`). A write to a view, or a result that autograd makes by itself, does not change a number; equal
programs still have equal numbers. A memory has a number of its own, from all calls that wrote to it (`_note_writes`).
Before an update, the numbers of parameters and states contain those of their memories.

Simulated ranks, and a process that is alone, have no numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import is_
from pathlib import PurePath
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm import call_purpose, current_communicator, is_noted, note_fact, when_compared
from meshwright.layout import TorchValue, user_frame

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..torch_hooks import FakeTensor, Operator, no_interception, written_arguments
from .dist_tensor import DistTensor
from .environment_hash import checksum, environment_hash, random_state
from .function_names import name_of
from .initial_checksum import initial_checksum_of, note_initial_checksum
from .tree import tensors_in

_MOST_FUNCTIONS = _MOST_LABELS = 8192
_functions: dict[TorchFunction, tuple[int, str, bool]] = {}
"""Function → its number, its name, and whether it writes to its arguments."""


class _Numbering:
    """True if calls are numbered in this process."""

    on = False


class _NotedOptions(NamedTuple):
    """The options of a group of parameters at one time, and the text of the plain ones.

    `fact` is the oldest of their facts, and so the first that may have been dropped.
    """

    keys: tuple[str, ...]
    values: tuple[object, ...]
    text: str
    fact: str = ""

    def holds(self, group: Mapping[str, object]) -> bool:
        """True if the group has the same options, which are the same objects."""
        return (
            len(group) == len(self.keys) + 1  # the parameters are no option
            and all(map(is_, self.values, map(group.get, self.keys)))
            and is_noted(self.fact)
        )


class _MadeTensors(threading.local):
    """The number of tensors that each line has made, the names of tensors by their numbers, and optimizers' options.

    The options are those of each group of parameters, as they were noted last. `has_writes` is True once a call has
    written to a leaf; optimizers write without such calls.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.labels: dict[int, str] = {}
        self.options: dict[tuple[type, int], _NotedOptions] = {}
        self.has_writes = False


_made = _MadeTensors()
_carry_out = vars(DistTensor)["__torch_function__"].__func__


def follow(on: bool = True) -> None:
    """Number all calls and tensors of this process from now on; no longer if `on` is False."""
    _Numbering.on = on
    function = classmethod(_numbered if on else _carry_out)
    DistTensor.__torch_function__ = function  # pyright: ignore[reportAttributeAccessIssue] - both take a class first


def is_numbering() -> bool:
    """True if calls are numbered in this process."""
    return _Numbering.on


T = TypeVar("T", bound=DistTensor)


def with_new_number(x: T, whole: Tensor | None = None) -> T:
    """Return `x`, which was made from a plain tensor, with a new number.

    The number is a hash of the line of the user's code, and of versions and settings. The values of `whole`, which all
    ranks have, are a fact that is shown if numbers differ; they are not part of the number, since a rank may overwrite
    them.
    """
    if _Numbering.on and not isinstance(x, FakeTensor):
        around, line = environment_hash(), PurePath(user_frame()).name
        count = _made.counts[line] = _made.counts.get(line, 0) + 1
        label, held = f"tensor {count} made at {line}", checksum(whole)
        note_fact(label, f"{x._spec!r} with checksum {held}")
        if whole is not None and not whole.is_meta:
            note_initial_checksum(x, held)
        if len(_made.labels) >= _MOST_LABELS:
            _made.labels.clear()
        x._number = hash((_hash_of_text(f"{label} {x._spec!r}"), around))
        _made.labels[x._number] = label
    return x


def add_number(x: Tensor | None, cause: object) -> None:
    """Make the number of `cause` count in the number of `x`, if `cause` was computed from distributed tensors."""
    number = getattr(cause, "_number", 0)
    if _Numbering.on and number and isinstance(x, DistTensor):
        x._number = hash((x._number, number))


def number_by_values(x: Tensor) -> None:
    """Make the values of the whole tensor, of which `x` is a part, count in the number of `x`."""
    if _Numbering.on and isinstance(x, DistTensor):
        label = _made.labels.get(x._number, "")
        x._number = hash((x._number, initial_checksum_of(x)))
        _made.labels[x._number] = label


def note_drawing(device: torch.device, generator: torch.Generator | None) -> None:
    """Add the state of a generator, which is equal on all ranks, to the number of the call in progress."""
    if _Numbering.on:
        number, name = call_purpose.what
        call_purpose.what = hash((number, random_state(device, generator))), name


def renumber_parameters(optimizer: Optimizer) -> None:
    """Give new numbers to the parameters that an optimizer is about to change, and the same to their gradients.

    A gradient that is not zeroed after the step keeps its number, which then counts in the next step.
    """
    if _Numbering.on:
        for at, group in enumerate(optimizer.param_groups):
            writes = _note_writes_of_group(optimizer, at)
            kept = _renumber(group["params"], hash((_hash_of_text(_options(optimizer, at)), writes)))
            note_fact(
                f"number of gradients left from the step before in group {at} of {type(optimizer).__name__}", kept
            )


def _note_writes_of_group(optimizer: Optimizer, at: int) -> int:
    """Return the number of all writes to the parameters and states of a group, and note it as a fact.

    It is 0 if there were none, as on a rank that has not made any.
    """
    found = 0
    if _made.has_writes:
        held = [x for p in optimizer.param_groups[at]["params"] for x in (p, *optimizer.state.get(p, {}).values())]
        world = current_communicator().size
        with no_interception():
            numbers = [_writes_to_memory(x, world) for x in held]
        found = hash(tuple(numbers)) if any(numbers) else 0
    note_fact(f"checksum of the writes to parameters and states of group {at} of {type(optimizer).__name__}", found)
    return found


def values_equal_on_ranks(optimizer: Optimizer | None) -> tuple[object, ...]:
    """Return the values that must be equal on all ranks for a step: versions, settings, optimizer options."""
    if not _Numbering.on:
        return ()
    groups = range(len(optimizer.param_groups)) if optimizer is not None else ()
    own = [(_options(optimizer, at), _note_writes_of_group(optimizer, at)) for at in groups if optimizer is not None]
    return (environment_hash(), *own)


def _options(optimizer: Optimizer, at: int) -> str:
    """Return the plain options of a group of parameters, and note them as facts."""
    group = optimizer.param_groups[at]
    known = _made.options.get((type(optimizer), at))
    if known is not None and known.holds(group):
        return known.text
    options = {k: v for k, v in group.items() if isinstance(v, (int, float, str, tuple))}
    names = [f"{name} of group {at} of {type(optimizer).__name__}" for name in options]
    for name, value in zip(names, options.values(), strict=True):
        note_fact(name, value)
    if len(_made.options) >= _MOST_LABELS:
        _made.options.clear()
    keys, text = tuple(name for name in group if name != "params"), repr(options)
    if next(tensors_in(options), None) is None:  # a tensor may change in place
        _made.options[type(optimizer), at] = _NotedOptions(keys, tuple(map(group.get, keys)), text, *names[:1])
    return text


def renumber_gradients(parameters: Iterable[Tensor], name: str, value: float) -> None:
    """Give new numbers to gradients that a plain value has changed, which must be equal on all ranks."""
    if _Numbering.on:
        note_fact(name, value)
        step = _hash_of_text(f"{name} {value!r}")
        for p in parameters:
            if isinstance(p.grad, DistTensor):
                p.grad._number = hash((p.grad._number, step))


def _renumber(parameters: Iterable[Tensor], step: int) -> int:
    """Give new numbers to parameters and gradients; return how many gradients are left from the step before."""
    kept = 0
    with no_interception():
        for p in parameters:
            if isinstance(p, DistTensor) and not isinstance(p, FakeTensor):
                grad = p.grad
                made = getattr(grad, "_number", 0)
                kept += made != 0 and made == p._number
                p._number = hash((p._number, made, p.requires_grad, step))
                if isinstance(grad, DistTensor):
                    grad._number = p._number
    return kept


def pass_number(x: DistTensor, y: DistTensor) -> None:
    """Give `y`, which has the value of `x`, the number of `x`."""
    if _Numbering.on:
        y._number = x._number


def number_result(func: TorchFunction, x: DistTensor, y: DistTensor) -> None:
    """Give `y`, the result of `func(x)`, the number that it would have had through `__torch_function__`."""
    if _Numbering.on:
        known, *_ = _functions.get(func) or _register_function(func)
        y._number = hash((known, x._number))


def keep_number(ctx: TorchValue) -> None:
    """Store the purpose of the forward pass in the context of an autograd function."""
    if _Numbering.on:
        ctx.what = call_purpose.what


class collectives_of_call:
    """Context in which this thread's collectives belong to a call on these tensors, or to these numbers."""

    def __init__(self, name: str, tensors: Iterable[Tensor] = (), numbers: Iterable[object] = ()) -> None:
        self.name, self.tensors, self.numbers = name, tensors, numbers

    def __enter__(self) -> None:
        self.before = call_purpose.what
        if _Numbering.on:
            own = _hash_of_text(f"{self.name}|{'|'.join(map(str, self.numbers))}")
            numbers = [getattr(x, "_number", 0) for x in self.tensors]
            label = _made.labels.get(numbers[0]) if numbers else None
            call_purpose.what = hash((own, *numbers)), f"{self.name} of {label}" if label else self.name

    def __exit__(self, *error: object) -> None:
        call_purpose.what = self.before


class collectives_of_gradient:
    """Context in which this thread's collectives belong to the gradient of the call that `keep_number` stored."""

    def __init__(self, ctx: TorchValue) -> None:
        self.ctx = ctx

    def __enter__(self) -> None:
        self.before = call_purpose.what
        if _Numbering.on:
            number, name = self.ctx.what
            call_purpose.what = hash((number, self.before[0])), f"the gradient of {name}"

    def __exit__(self, *error: object) -> None:
        call_purpose.what = self.before


def _numbered(
    cls: type[DistTensor],
    func: TorchFunction,
    types: Sequence[type],
    args: Arguments = (),
    kwargs: NamedArguments | None = None,
) -> TorchValue:
    """Carry out a call as `DistTensor.__torch_function__` does, and number its results."""
    known, name, writes = _functions.get(func) or _register_function(func)
    writes_to_leaf = writes and _begins_with_leaf(args)
    if writes_to_leaf:
        current_communicator().settle()
    before = call_purpose.what
    if len(args) == 2 and type(args[1]) is DistTensor and type(args[0]) is DistTensor and not kwargs:
        call_purpose.what = hash((known, args[0]._number, args[1]._number)), name
    else:
        call_purpose.what = _number_of(known, args, kwargs), name
    try:
        out = _carry_out(cls, func, types, args, kwargs)
    finally:
        number, call_purpose.what = call_purpose.what[0], before  # which `note_drawing` may have changed
    if writes_to_leaf or (kwargs and "out" in kwargs):
        _note_writes((args[:1], kwargs and kwargs.get("out")), number)
    if type(out) is DistTensor:
        out._number = number
    elif out is not None:
        _number_all(out, number)
    return out


_WRITES = "_meshwright_writes"
"""Attribute of a storage: the number of the calls that wrote to it."""


def _note_writes(targets: TorchValue, number: int) -> None:
    """Make a call count in the number of the memories that it wrote to, also through a view or `x.data`."""
    _made.has_writes = True
    with no_interception():
        for x in tensors_in(targets):
            if isinstance(x, DistTensor) and not isinstance(x, FakeTensor):
                held = x._base_with_memory().untyped_storage().__dict__
                held[_WRITES] = hash((held.get(_WRITES, 0), number))


def _writes_to_memory(x: object, world: int) -> int:
    """Return the number of the memory of a tensor that all ranks of the world have; call it with interception off."""
    if not isinstance(x, DistTensor) or isinstance(x, FakeTensor) or x._spec.mesh.size != world:
        return 0
    return x._base_with_memory().untyped_storage().__dict__.get(_WRITES, 0)


def _begins_with_leaf(args: Arguments) -> bool:
    """True if the first tensor of a call is a leaf, and so may be a parameter."""
    target = args[0] if args else None
    first = target[0] if isinstance(target, (list, tuple)) and target else target
    return isinstance(first, Tensor) and first.is_leaf


def _number_of(known: int, args: Arguments, kwargs: NamedArguments | None) -> int:
    parts: list[float] = [known]
    _collect(args, parts)
    if kwargs:
        _collect(kwargs.values(), parts)
    return hash(tuple(parts))


def _collect(values: Iterable[TorchValue], parts: list[float]) -> None:
    """Add the numbers of the tensors, and the plain numbers, among the arguments of a call."""
    for value in values:
        kind = type(value)
        if kind is DistTensor:
            parts.append(value._number)
        elif kind is int or kind is bool or (kind is float and value == value):  # the hash of a NaN is its address
            parts.append(value)
        elif kind is list or kind is tuple:
            _collect(value, parts)
        elif isinstance(value, DistTensor):
            parts.append(value._number)


def _number_all(out: object, number: int) -> None:
    """Give numbers to a result that is a tensor of a derived class, or several tensors, perhaps in nested lists."""
    if isinstance(out, DistTensor):
        out._number = number
    elif isinstance(out, (tuple, list)):
        for at, each in enumerate(cast("Sequence[object]", out)):
            _number_all(each, hash((number, at)))


def _register_function(func: TorchFunction) -> tuple[int, str, bool]:
    if len(_functions) >= _MOST_FUNCTIONS:
        _functions.clear()
    name = name_of(func)
    found = _functions[func] = (_hash_of_text(name), name, _writes(func))
    return found


def _writes(func: TorchFunction) -> bool:
    """True if a function writes to its arguments: by its schema, or by its name in Python."""
    if isinstance(func, Operator):
        return bool(written_arguments(func))
    name: str = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name in ("__set__", "__setitem__") or name.startswith("__i")
    return name.endswith("_")


def _hash_of_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


when_compared(follow)
