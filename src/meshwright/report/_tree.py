"""Show layers as a tree: each can be opened, and shows its tensors and their layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshwright.search import TensorLayout, count, size

from ._html import Markup, element, folded, joined, table

SMALL = 2
"""Layers of at most so many tensors are rows of the layer above."""
FEW = 12
"""Trees of at most so many layers are open at first."""


@dataclass(slots=True)
class _Layer:
    rows: list[TensorLayout] = field(default_factory=list[TensorLayout])
    below: dict[str, _Layer] = field(default_factory=dict[str, "_Layer"])

    def all_rows(self) -> list[TensorLayout]:
        return [*self.rows, *(row for layer in self.below.values() for row in layer.all_rows())]

    @property
    def is_small(self) -> bool:
        """True if its tensors are shown among those of the layer above."""
        return not self.below and len(self.rows) <= SMALL


def tree(rows: Iterable[TensorLayout]) -> Markup:
    """Return the tree of the layers of these rows, outermost first."""
    top = _Layer()
    for row in rows:
        at = top
        for part in filter(None, row.layer.split(".")):
            at = at.below.setdefault(part, _Layer())
        at.rows.append(row)
    is_open = len(top.below) <= FEW and len(top.all_rows()) <= 5 * FEW
    return joined(_inside("the model", top, is_open))


def _inside(name: str, layer: _Layer, is_open: bool) -> Iterator[Markup]:
    """Yield the tensors of a layer and of the small layers in it, then the other layers, each to be opened."""
    own = [(row.name, row) for row in layer.rows]
    own += [(f"{n}.{row.name}", row) for n, below in layer.below.items() if below.is_small for row in below.rows]
    if own:
        yield _tensors(name, own)
    for n, below in layer.below.items():
        if not below.is_small:
            yield folded(_summary(n, below.all_rows()), *_inside(n, below, is_open), is_open=is_open)


def _summary(name: str, rows: list[TensorLayout]) -> Markup:
    number, nbytes = sum(row.count for row in rows), sum(row.count * row.nbytes for row in rows)
    many = f"{count(number)} tensor{'s' if number != 1 else ''}, {size(nbytes)} per rank"
    return joined([f"{name} ", element("span", many)])


def _tensors(name: str, rows: list[tuple[str, TensorLayout]]) -> Markup:
    cells = [(own, element("code", row.layout), size(row.nbytes), row.note) for own, row in rows]
    return table(f"tensors of {name}", ("tensor", "layout", "per rank", "note"), cells, {2})
