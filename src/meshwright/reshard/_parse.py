"""Parser of steps from their `repr`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from meshwright.layout import PARTIAL_OPS, LayoutError, ProcessMesh, Spec, parse_layout, parse_spec

from ._errors import ReshardError
from ._steps import (
    AllGather,
    AllReduce,
    AllToAll,
    ConversionStep,
    Exchange,
    Fill,
    Pad,
    Places,
    ReduceScatter,
    Relabel,
    Scale,
    Slice,
    View,
)

_PLACES = re.compile(r"(?P<places>[^,;]+, dim \d{1,4}(?:; [^,;]+, dim \d{1,4})*)(?P<notes>[^,;]*)")


def parse_step(text: str, mesh: ProcessMesh | None = None) -> ConversionStep:
    """Return the step with this text; `mesh` is the target mesh of a View or an Exchange.

    >>> parse_step("ReduceScatter(x y, dim 0 over x max)")
    ReduceScatter(x y, dim 0 over x max)

    Raises:
        ReshardError: the text is no step.
    """
    kind, bracket, rest = text.partition("(")
    if kind not in _READERS or not bracket or not rest.endswith(")"):
        raise _no_step(text, f"steps are {', '.join(_READERS)}")
    try:
        return _READERS[kind](rest[:-1], mesh)
    except LayoutError as error:
        raise _no_step(text, error.why) from error
    except ValueError as error:
        raise _no_step(text, str(error)) from None


def _no_step(text: str, why: str) -> ReshardError:
    return ReshardError(
        f"{text!r}", "text that is not a step", why, "write it as in AllReduce(dp tp) or AllGather(tp, dim 0)"
    )


def _places(text: str) -> Places:
    places, rest = _split(text)
    if rest:
        raise ValueError(f"{' '.join(rest)!r} has no meaning here")
    return places


def _split(text: str) -> tuple[Places, list[str]]:
    """Return the places in a text such as `x y, dim 0; z, dim 1`, and the words after them."""
    found = _PLACES.fullmatch(text)
    if found is None:
        raise ValueError("a place is written as axes and the dim that they shard: x y, dim 0; z, dim 1")
    runs = [run.split(", dim ") for run in found["places"].split("; ")]
    return tuple((axis, int(dim)) for axes, dim in runs for axis in _names(axes.split())), found["notes"].split()


def _joining(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the axes and the operation: the last word if it is one, otherwise "sum"."""
    if len(words) > 1 and words[-1] in PARTIAL_OPS:
        return _names(words[:-1]), words[-1]
    return _names(words), "sum"


def _names(words: Sequence[str]) -> tuple[str, ...]:
    wrong = [w for w in words if not w.isidentifier()]
    if wrong or not words:
        raise ValueError(f"{wrong[0]!r} is not the name of an axis" if wrong else "there is no axis")
    return tuple(words)


def _reduce_scatter(text: str) -> ReduceScatter:
    places, notes = _split(text)
    if notes[:1] == ["over"]:
        axes, op = _joining(notes[1:])
        return ReduceScatter(axes, places, op)
    if len(notes) > 1 or not set(notes) <= set(PARTIAL_OPS):
        raise ValueError(f"{' '.join(notes)!r} is not a reduction")
    return ReduceScatter(tuple(axis for axis, _ in places), places, *notes)


def _all_to_all(text: str) -> AllToAll:
    layout = parse_layout(text)
    if layout.marks():
        raise ValueError("an AllToAll has sharded dims only, and no marks")
    return AllToAll(tuple(dim for dim in layout.dims if isinstance(dim, tuple)))


def _scale(text: str) -> Scale:
    axes, _, op = text.rpartition(" to ")
    if op not in PARTIAL_OPS:
        raise ValueError(f"{op!r} is not a reduction")
    return Scale(_names(axes.split()), op)


def _exchange(text: str, mesh: ProcessMesh | None) -> Exchange:
    spec, _, where = text.partition(" on ")
    if mesh is not None and where != repr(mesh):
        raise ValueError(f"the target mesh is {where}, and the given mesh is {mesh!r}")
    return Exchange(_spec(spec, mesh))


def _spec(text: str, mesh: ProcessMesh | None) -> Spec:
    if mesh is None:
        raise ValueError("the mesh is missing; call parse_step(text, mesh)")
    return parse_spec(text, mesh)


_READERS: dict[str, Callable[[str, ProcessMesh | None], ConversionStep]] = {
    "Slice": lambda text, mesh: Slice(_places(text)),
    "AllGather": lambda text, mesh: AllGather(_places(text)),
    "ReduceScatter": lambda text, mesh: _reduce_scatter(text),
    "AllReduce": lambda text, mesh: AllReduce(*_joining(text.split())),
    "AllToAll": lambda text, mesh: _all_to_all(text),
    "Fill": lambda text, mesh: Fill(*_joining(text.split())),
    "Pad": lambda text, mesh: Pad(_places(text)),
    "Scale": lambda text, mesh: _scale(text),
    "Relabel": lambda text, mesh: Relabel(parse_layout(text)),
    "View": lambda text, mesh: View(_spec(text, mesh)),
    "Exchange": _exchange,
}
