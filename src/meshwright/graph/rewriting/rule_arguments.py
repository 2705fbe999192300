"""Arguments of a rewrite rule (tensors, constants, choices) and the notation for their shapes.

"... d, d"              one entry per tensor argument, in order; equal names mean equal sizes
"..."                   any leading dims, equal in all entries
"* s t"                 any leading dims, not compared; `s` or `t` may be one if the tensor is broadcast
"n c, int n < c"        integers below c; `bool` for masks
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import RewriteError

Kind = Literal["tensor", "attribute", "choice"]
Sizes = Mapping[str, Any]

MOST_CHARACTERS = 1000
"""Maximum length of a shapes line, in characters."""
_ENTRY = re.compile(r"(?:(?P<kind>int|bool)\b)?\s*(?P<dims>[^<]*?)\s*(?:<\s*(?P<below>\w+))?")
_ATTRIBUTES: dict[object, tuple[TorchValue, TorchValue]] = {
    float: (0.5, 0.25),
    int: (-1, -2),
    torch.dtype: (torch.bfloat16, torch.float16),
}
_BY_NAME = {"float": float, "int": int, "bool": bool, "torch.dtype": torch.dtype}


@dataclass(frozen=True, slots=True)
class Shape:
    """One entry of a shapes line."""

    dims: tuple[str, ...]
    kind: Literal["float", "int", "bool"] = "float"
    below: str = ""

    def sized(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape with its names replaced by the given sizes."""
        found: list[int] = []
        for dim in self.dims:
            if dim == "...":
                found += sizes["..."]
            elif dim != "*":
                found.append(int(dim) if dim.isdigit() else sizes[dim])
        return tuple(found)

    def fits(self, shape: Sequence[Any], sizes: dict[str, Any]) -> bool:
        """True if a tensor of `shape` matches this entry under the known `sizes`; adds newly found sizes to `sizes`."""
        head, tail = (self.dims[:1], self.dims[1:]) if self.dims[:1] in (("...",), ("*",)) else ((), self.dims)
        lead = len(shape) - len(tail)
        if lead < 0 or (lead and not head):
            return False
        if head == ("...",) and list(map(str, sizes.setdefault("...", shape[:lead]))) != list(map(str, shape[:lead])):
            return False
        for dim, size in zip(tail, shape[lead:], strict=True):
            wanted = int(dim) if dim.isdigit() else sizes.setdefault(dim, size)
            if str(wanted) != str(size) and not (head == ("*",) and str(size) == "1"):
                return False
        return True


def kind_of_dtype(dtype: torch.dtype) -> str:
    """Return the word that the notation uses for a dtype: `float`, `int` or `bool`."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def parse_shapes(line: str, tensors: Sequence[str]) -> dict[str, Shape]:
    """Return the shape of each tensor argument by name. Raises RewriteError for a line that cannot be read.

    >>> parse_shapes("n c, int n < c", ["x", "t"])["t"]
    Shape(dims=('n',), kind='int', below='c')
    """
    if not line:
        return {}
    if len(line) > MOST_CHARACTERS:
        why = f"the shapes of a rule have at most {MOST_CHARACTERS} characters"
        raise RewriteError(f"shapes {line[:80]!r}", f"{len(line)} characters", why, 'write "... d, d" for x and w')
    entries = [entry.strip() for entry in line.split(",")]
    found = [_ENTRY.fullmatch(entry) for entry in entries]
    if len(entries) != len(tensors) or not all(found):
        raise RewriteError(
            f"shapes {line!r}",
            f"{len(entries)} entries, tensors {', '.join(tensors)}",
            "there must be one entry per tensor argument",
            'write "... d, d" for x and w',
        )
    return {
        name: Shape(tuple(m["dims"].split()), m["kind"] or "float", m["below"] or "")  # pyright: ignore[reportArgumentType] - one of its kinds
        for name, m in zip(tensors, found, strict=True)
        if m is not None
    }


def sample_sizes(shapes: Mapping[str, Shape], other: bool = False) -> dict[str, Any]:
    """Return a distinct size for every name; with `other`, a second set of sizes."""
    sizes: dict[str, Any] = {"...": (3, 2) if other else (2, 3)}
    numbers = count(6 if other else 4, 2)
    for shape in shapes.values():
        for dim in (*shape.dims, *filter(None, [shape.below])):
            if dim not in ("...", "*") and not dim.isdigit() and dim not in sizes:
                sizes[dim] = next(numbers)
    return sizes


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a rule; `of` is the type of an attribute, or the options of a choice."""

    name: str
    kind: Kind
    of: TorchValue = None
    samples: tuple[TorchValue, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleVariant:
    """A rule with fixed choices. `given` holds the chosen values, None for an omitted tensor."""

    given: Mapping[str, Any]
    tensors: tuple[str, ...]
    attributes: tuple[Argument, ...]


def arguments_of(fn: Callable[..., Any], samples: Mapping[str, Sequence[Any]]) -> tuple[Argument, ...]:
    """Return the arguments of a rule's function, classified by annotation or default value."""
    hints = _hints(fn)
    return tuple(
        _argument(p.name, hints.get(p.name), p.default, samples.get(p.name))
        for p in inspect.signature(fn).parameters.values()
    )


def variants_of(arguments: Sequence[Argument]) -> Iterator[RuleVariant]:
    """Yield a variant for every combination of choices."""
    choices, attributes = (_of_kind(arguments, kind) for kind in ("choice", "attribute"))
    for options in product(*(choice.of for choice in choices)):
        chosen = zip(choices, options, strict=True)
        given = {choice.name: option for choice, option in chosen if option is not Tensor}
        tensors = tuple(name for name in tensor_names(arguments) if name not in given)
        yield RuleVariant(given, tensors, attributes)


def _of_kind(arguments: Sequence[Argument], kind: Kind) -> tuple[Argument, ...]:
    return tuple(a for a in arguments if a.kind == kind)


def tensor_names(arguments: Sequence[Argument]) -> list[str]:
    """Return the names of arguments that are tensors or optional tensors."""
    return [a.name for a in arguments if a.kind == "tensor" or (a.kind == "choice" and Tensor in a.of)]


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):  # annotations of a function inside another one
        written = getattr(fn, "__annotations__", {})
        return {name: _BY_NAME.get(text, text) for name, text in written.items()}


def _argument(name: str, hint: object, default: object, samples: Sequence[TorchValue] | None) -> Argument:
    empty = default is inspect.Parameter.empty
    if get_origin(hint) is Literal:
        return Argument(name, "choice", get_args(hint))
    if hint is bool or isinstance(default, bool):
        return Argument(name, "choice", (False, True))
    if (not empty and default is None) or _may_be_none(hint):
        return Argument(name, "choice", (Tensor, None))
    if hint in (None, Tensor, "Tensor", "torch.Tensor") and empty and samples is None:
        return Argument(name, "tensor")
    kind = hint if hint is not None else type(samples[0] if samples else default)
    return Argument(name, "attribute", kind, _samples(name, kind, None if empty else default, samples))


def _may_be_none(hint: object) -> bool:
    return get_origin(hint) in (types.UnionType, typing.Union) and type(None) in get_args(hint)


def _samples(name: str, kind: object, default: object, samples: Sequence[TorchValue] | None) -> tuple[TorchValue, ...]:
    """Return two values for the constant: the default and a different one. Raises RewriteError if none is known."""
    if samples is not None:
        return tuple(samples)
    if isinstance(default, float):
        return default, 2 * default + 0.125
    if isinstance(default, int):
        return default, default - 1
    if kind in _ATTRIBUTES:
        return _ATTRIBUTES[kind]
    raise RewriteError(
        f"argument {name} of a rule",
        f"{kind!r}",
        "two valid values are needed to tell this constant from others",
        f'pass Rewrite(..., samples={{"{name}": (one, another)}})',
    )
