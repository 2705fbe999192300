"""Making sure of a match: `find` is watched again on exactly what was found, and `put` beside it.

What both say for given shapes, dtypes, constants and modes is kept, so that a model with equal layers asks once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.layout import Spec
from meshwright.tensor import leaves_in

from ._arguments import Shape, kind_of_dtype
from ._errors import RewriteError
from ._match import Match
from ._node import Carry, Node, Value, map_values
from ._pattern import Constant, Pattern, Term, constant_at
from ._reader import CASTS, Said, same_constant
from ._rewrite import Rewrite
from ._text import type_text
from ._watch import Modes, Told, origin_modes, watch


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """What `put` does for arguments of given looks: its calls on `inputs`, and its results."""

    inputs: Mapping[str, Value]
    calls: tuple[Node, ...]
    outs: tuple[Value, ...]


@dataclass(slots=True)
class _Sides:
    """Both sides for arguments of given looks; `put` is watched when a program has what `find` does of them."""

    find: Told
    given: Mapping[str, Any]
    lie: Mapping[Value, Spec]
    template: Template | None = None
    refused: bool = False


@dataclass(slots=True)
class Confirmed:
    """One pattern of a rule, with everything that was found out about it."""

    rule: Rewrite
    pattern: Pattern
    rank: int
    known: dict[Any, _Sides | None] = field(default_factory=dict[Any, "_Sides | None"])

    def template(self, match: Match) -> Template | None:
        """What to put for a match; None where `find` would do something else for exactly these arguments."""
        if not _fit(self.rule.tensor_shapes, match.arguments) or not self.rule.is_met(match.arguments, match):
            return None
        modes = origin_modes(next(iter(match.spots)).origin)[1]
        specs = specs_of(match)
        look = (
            tuple(_look(v) for _, v in sorted(match.names.items())),
            tuple(str(spec) for _, spec in sorted(specs.items())),
            modes,
        )
        if look not in self.known:
            self.known[look] = self._find(match, modes, specs)
        sides = self.known[look]
        if sides is None or sides.refused or not all(_agrees(t, v, sides.find) for t, v in match.values.items()):
            return None
        if not all(_is_computed(c, found, sides.find) for c, found in match.computed):
            return None
        if sides.template is None:
            self._put(sides, modes)
        return sides.template

    def _find(self, match: Match, modes: Modes, specs: Mapping[str, Spec]) -> _Sides | None:
        given = {name: stand_in(name, v) for name, v in match.arguments.items()}
        lie = {given[name]: spec for name, spec in specs.items()}
        try:
            find = watch(self.rule.find, given, self.rank, modes, lie)
        except RewriteError:
            raise
        except Exception:  # torch refuses such shapes, in many ways: so find does not compute this
            return None
        return _Sides(find, given, lie) if len(find.calls) == len(self.pattern.told.calls) else None

    def _put(self, sides: _Sides, modes: Modes) -> None:
        """Watches `put`. Refused is what differs under autocast, whose dtypes no rule knows, and what needs symbols."""
        try:
            put = watch(self.rule.put, sides.given, self.rank, modes, sides.lie)
        except RewriteError:
            raise
        except Exception as error:  # whatever torch raises for such arguments
            raise self._wrong(sides.given, f"put raises {str(error).splitlines()[0]}") from error
        calls, outs = _without_idle_casts(put)
        wanted = results(sides.find.out)
        if len(outs) != len(wanted) or not all(isinstance(v, Value) for v in outs):
            raise self._wrong(sides.given, f"find gives {len(wanted)} tensors, put {put.out!r}")
        wrong = [(a, b) for a, b in zip(wanted, outs, strict=True) if _looks(a) != _looks(b)]
        if wrong and modes is None:
            raise self._wrong(sides.given, f"find gives {type_text(wrong[0][0])}, put {type_text(wrong[0][1])}")
        sides.refused = bool(wrong) or any(_asks_sizes((call.args, call.kwargs)) for call in calls)
        sides.template = None if sides.refused else Template(put.inputs, calls, outs)

    def _wrong(self, given: Mapping[str, Any], found: str) -> RewriteError:
        about = ", ".join(f"{k}: {type_text(v) if isinstance(v, Value) else v!r}" for k, v in given.items())
        return RewriteError(
            f"rule {self.rule.name} for {about}", found, "both sides of a rule give the same for the same arguments",
            "a where=... that refuses such arguments, or a cast in put",
        )  # fmt: skip


def results(out: Any) -> tuple[Any, ...]:
    """What a side of a rule returns, as a tuple."""
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def stand_in(name: str, v: Any) -> Any:
    """A value of a rule's own for one of the program."""
    return Value(name, tuple(v.shape), v.dtype, v.device) if isinstance(v, (Value, Said)) else v


def specs_of(match: Match) -> dict[str, Spec]:
    """How operands of steps lie: argument → spec."""
    found: dict[str, Spec] = {}
    for spot in match.spots:
        if not isinstance(spot.op, Carry):
            continue
        for name, v in match.names.items():
            if any(x is v for x in spot.ins):
                found[name] = spot.op.src
    return found


def _fit(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> bool:
    sizes: dict[str, Any] = {}
    return all(
        shape.fits(v.shape, sizes) and isinstance(v.dtype, torch.dtype) and kind_of_dtype(v.dtype) == shape.kind
        for name, shape in shapes.items()
        if isinstance(v := given.get(name), (Value, Said))
    )  # fmt: skip


def _without_idle_casts(told: Told) -> tuple[tuple[Node, ...], tuple[Any, ...]]:
    """The calls of `put` without casts to the dtype that is there already."""
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


def _asks_sizes(tree: Any) -> bool:
    """True when a size that is only known later stands among constants: programs hold such numbers as values."""
    return any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in leaves_in(tree))


def _followed(tree: Any, same: Mapping[Value, Value]) -> Any:
    return map_values(lambda v: same.get(v, v), tree)


def _agrees(term: Term, v: Any, find: Told) -> bool:
    """True when what was found for a term looks like what `find` makes there."""
    if term.number < 0:
        return True
    outs = find.calls[term.number].outs
    return term.place < len(outs) and _looks(v) == _looks(outs[term.place])


def _is_computed(wanted: Constant, found: Any, find: Told) -> bool:
    """True when a constant is the one that `find` computes, or of a cast, whose dtype its result tells."""
    if find.calls[wanted.at[0]].op in CASTS:
        return True
    return same_constant(constant_at(find, wanted.at), wanted.undone(found))


def _looks(v: Any) -> Any:
    return tuple(map(str, v.shape)), v.dtype


def _look(v: Any) -> Any:
    if isinstance(v, (Value, Said)):
        return (*_looks(v), v.device)
    return repr(v)
