"""Confirmation of matches: `find` is traced again with exactly the matched arguments, and `put` with the same ones.

Both traces are cached by shapes, dtypes, constants and modes, so that equal layers of a model are traced once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.layout import TorchValue
from meshwright.tensor import leaves_in

from .._errors import RewriteError
from ..program.node import Kind, Node, Value, map_values
from ..program.node_text import type_text
from .node_reader import CASTS, Operand, VirtualValue, same_constant
from .pattern import Constant, Pattern, Term, constant_at
from .pattern_match import Match
from .rewrite_rule import Rewrite
from .rule_arguments import Shape, kind_of_dtype
from .rule_trace import CallTrace, Modes, origin_modes, trace_calls


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The trace of `put` for arguments of given shapes and dtypes: its calls on `inputs`, and its results."""

    inputs: Mapping[str, Value]
    calls: tuple[Node, ...]
    outs: tuple[Value, ...]


@dataclass(slots=True)
class _Sides:
    """Traces of both sides for arguments of given shapes and dtypes. `put` is traced only after `find` matches."""

    find: CallTrace
    given: Mapping[str, Any]
    template: Template | None = None
    refused: bool = False


@dataclass(slots=True)
class Confirmed:
    """One pattern of a rule, with its cached traces."""

    rule: Rewrite
    pattern: Pattern
    known: dict[Hashable, _Sides | None] = field(default_factory=dict[Hashable, "_Sides | None"])

    def template(self, match: Match) -> Template | None:
        """Return the template to put for a match; None if `find` does something else for exactly these arguments."""
        if not _fit(self.rule.tensor_shapes, match.arguments) or not self.rule.is_met(match.arguments, match):
            return None
        modes = origin_modes(next(iter(match.spots)).origin)[1]
        look = tuple(_look(v) for _, v in sorted(match.names.items())), modes
        if look not in self.known:
            self.known[look] = self._find(match, modes)
        sides = self.known[look]
        if sides is None or sides.refused or not all(_agrees(t, v, sides.find) for t, v in match.values.items()):
            return None
        if not all(_is_computed(c, found, sides.find) for c, found in match.computed):
            return None
        if sides.template is None:
            self._put(sides, modes)
        return sides.template

    def _find(self, match: Match, modes: Modes) -> _Sides | None:
        given = {name: value_like(name, v) for name, v in match.arguments.items()}
        try:
            find = trace_calls(self.rule.find, given, modes)
        except RewriteError:
            raise
        except Exception:  # torch raises various errors for such shapes: find does not compute this
            return None
        return _Sides(find, given) if len(find.calls) == len(self.pattern.told.calls) else None

    def _put(self, sides: _Sides, modes: Modes) -> None:
        """Trace `put` and set the template, or `refused`.

        A match is refused if a call has symbolic constants, or if a result has another shape or dtype under modes such
        as autocast. Raises RewriteError if `put` raises, or if its results differ from those of `find` without modes.
        """
        try:
            put = trace_calls(self.rule.put, sides.given, modes)
        except RewriteError:
            raise
        except Exception as error:  # torch raises various errors for such arguments
            raise self._wrong(sides.given, f"put raises {str(error).splitlines()[0]}") from error
        calls, outs = _without_idle_casts(put)
        wanted = results(sides.find.out)
        if len(outs) != len(wanted) or not all(isinstance(v, Value) for v in outs):
            raise self._wrong(sides.given, f"find returns {len(wanted)} tensors, put returns {put.out!r}")
        wrong = [(a, b) for a, b in zip(wanted, outs, strict=True) if _looks(a) != _looks(b)]
        if wrong and modes is None:
            raise self._wrong(
                sides.given, f"find returns {type_text(wrong[0][0])}, put returns {type_text(wrong[0][1])}"
            )
        sides.refused = bool(wrong) or any(_asks_sizes((call.args, call.kwargs)) for call in calls)
        sides.template = None if sides.refused else Template(put.inputs, calls, outs)

    def _wrong(self, given: Mapping[str, Any], found: str) -> RewriteError:
        about = ", ".join(f"{k}: {type_text(v) if isinstance(v, Value) else v!r}" for k, v in given.items())
        return RewriteError(
            f"rule {self.rule.name} for {about}",
            found,
            "both sides of a rule must return the same for the same arguments",
            "add a where=... that refuses such arguments, or a cast in put",
        )


def results(out: TorchValue) -> tuple[TorchValue, ...]:
    """Return the result of a side of a rule as a tuple."""
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def value_like(name: str, v: TorchValue) -> TorchValue:
    """Return a new value named `name` with the metadata of `v`; `v` itself if it is a constant."""
    return Value(name, tuple(v.shape), v.dtype, v.device) if isinstance(v, (Value, VirtualValue)) else v


def _fit(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> bool:
    sizes: dict[str, Any] = {}
    return all(
        shape.fits(v.shape, sizes) and isinstance(v.dtype, torch.dtype) and kind_of_dtype(v.dtype) == shape.kind
        for name, shape in shapes.items()
        if isinstance(v := given.get(name), (Value, VirtualValue))
    )


def _without_idle_casts(told: CallTrace) -> tuple[tuple[Node, ...], tuple[TorchValue, ...]]:
    """Return the calls and results of `put` without casts to the dtype that the operand already has."""
    same: dict[Value, Value] = {}
    kept: list[Node] = []
    for call in told.calls:
        args, kwargs = _followed((call.args, dict(call.kwargs)), same)
        x = args[0] if args else None
        if call.op in CASTS and isinstance(x, Value) and _looks(x) == _looks(call.out):
            same[call.out] = x
        else:
            kept.append(replace(call, args=args, kwargs=kwargs))
    return tuple(kept), tuple(_followed(v, same) for v in results(told.out))


def _asks_sizes(tree: TorchValue) -> bool:
    """True if the tree contains a symbolic size. Programs hold such numbers as values, not as constants."""
    return any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in leaves_in(tree))


def _followed(tree: TorchValue, same: Mapping[Value, Value]) -> TorchValue:
    return map_values(lambda v: same.get(v, v), tree)


def _agrees(term: Term, v: Operand, find: CallTrace) -> bool:
    """True if the value found for a term has the shape and dtype that `find` makes there."""
    if term.number < 0:
        return True
    outs = find.calls[term.number].outs
    return term.place < len(outs) and _looks(v) == _looks(outs[term.place])


def _is_computed(wanted: Constant, found: TorchValue, find: CallTrace) -> bool:
    """True if a constant equals the one that `find` computes, or belongs to a cast, whose dtype the result shows."""
    if find.calls[wanted.at[0]].op in CASTS:
        return True
    return same_constant(constant_at(find, wanted.at), wanted.undone(found))


def _looks(v: Operand) -> tuple[tuple[str, ...], Kind]:
    return tuple(map(str, v.shape)), v.dtype


def _look(v: TorchValue) -> Hashable:
    if isinstance(v, (Value, VirtualValue)):
        return (*_looks(v), v.device)
    return repr(v)
