"""Show the layout of a tensor on its mesh, or of the parameters of a model, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any

from torch import Tensor, nn

from meshwright.layout import MeshwrightError, ProcessMesh, Spec, parse_spec, write_dtype
from meshwright.search import size
from meshwright.tensor import DistTensor

from ._html import Markup, element, table
from ._pieces import Pieces, Segment

MOST_ROWS, MOST_COLUMNS, MOST_GRIDS, MOST_HOLDERS = 16, 8, 8, 6
"""Most rows, columns, grids and holders that are shown; the number of further ones is printed."""
JOINED = {"sum": "+", "avg": "+", "max": "^", "min": "v", "prod": "·", "any": "|", "all": "&"}
COLOURS = ("#a9c4e9", "#a8d8b9", "#f2d49b", "#d9c0e6", "#efb0a8", "#c9cdd2", "#9fd9d9", "#e3c7ad")
CELL, HIGH, LEFT, TOP = 92, 34, 96, 44


class ShowError(MeshwrightError, TypeError):
    """An object was to be shown that is on no mesh."""


@dataclass(frozen=True, repr=False)
class Picture:
    """A tensor's layout over its mesh: as text, or as `svg`. Print it; a notebook draws it."""

    spec: Spec

    def __str__(self) -> str:
        return "\n".join(_text(Pieces.of(self.spec)))

    __repr__ = __str__

    @property
    def svg(self) -> str:
        """Return the picture as self-contained SVG."""
        return _svg(Pieces.of(self.spec))

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, repr=False)
class Listing:
    """A table of a model's parameters and buffers: layouts, and bytes of the whole tensor and of a rank's part."""

    title: str
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        rows = [_HEAD, *self.rows]
        widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
        lines = [
            "  ".join(c.rjust(w) if at > 1 else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join([self.title, *(line.rstrip() for line in lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table(self.title, _HEAD, self.rows, {2, 3})


_HEAD = ("name", "layout", "whole", "per rank")


def show(x: Any, mesh: ProcessMesh | None = None) -> Picture | Listing:
    """Return a picture of the layout of `x`: a distributed tensor, a spec, a spec's text with its `mesh`, or a model.

    A cell is a piece with the ranks that hold it: "0, 2" hold the same piece, "0+2" hold terms of it. A model is shown
    as a table of its parameters and buffers.

    >>> import meshwright as mw
    >>> mesh = mw.ProcessMesh([[0, 1, 2], [3, 4, 5]], ["dp", "tp"])
    >>> print(mw.show("f32[8, 10@tp] +dp", mesh))
    f32[8, 10@tp] +dp on ProcessMesh([dp=2, tp=3])
    a rank holds at most 128 B of 320 B
           dim 1  0:4  4:8  8:10
    dim 0  0:8    0+3  1+4  2+5

    Raises:
        ShowError: `x` is on no mesh.
    """
    if isinstance(x, DistTensor):
        return Picture(x.spec)
    if isinstance(x, Spec):
        return Picture(x)
    if isinstance(x, str) and mesh is not None:
        return Picture(parse_spec(x, mesh))
    if isinstance(x, nn.Module):
        return _listing(x)
    raise ShowError(
        "a picture of a layout",
        _described(x),
        "the object is on no mesh",
        'pass a DistTensor, its spec, a model, or call show("f32[8@dp, 16]", mesh)',
    )


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a plain tensor of shape {tuple(x.shape)}"
    return f"the text {x!r} without a mesh" if isinstance(x, str) else f"a {type(x).__name__}"


def _listing(model: nn.Module) -> Listing:
    held = [*model.named_parameters(), *model.named_buffers()]
    rows, whole, part = list[tuple[str, ...]](), 0, 0
    for name, x in held:
        spec = x.spec if isinstance(x, DistTensor) else None
        full = spec.nbytes if spec is not None else x.numel() * x.element_size()
        own = _most(spec) if spec is not None else full
        lies = repr(spec) if spec is not None else f"{write_dtype(x.dtype)}{list(x.shape)} plain"
        rows.append((name, lies, size(full), size(own)))
        whole, part = whole + full, part + own
    meshes = dict.fromkeys(x.mesh for _, x in held if isinstance(x, DistTensor))
    where = ", ".join(map(repr, islice(meshes, 4))) or "no mesh"
    title = f"{type(model).__name__} on {where}{' and others' if len(meshes) > 4 else ''}"
    return Listing(title, (*rows, ("total", "", size(whole), size(part))))


def _most(spec: Spec) -> int:
    """Return the bytes of the largest part, which is that of the first rank."""
    return prod(spec.concrete.local_shape(spec.mesh.process_ids[0])) * spec.dtype.itemsize


def _head(spec: Spec) -> list[str]:
    return [f"{spec!r} on {spec.mesh!r}", f"a rank holds at most {size(_most(spec))} of {size(spec.nbytes)}"]


def _text(pieces: Pieces) -> list[str]:
    grids = list(islice(_grids(pieces), MOST_GRIDS + 1))
    lines = _head(pieces.spec)
    for title, cells in grids[:MOST_GRIDS]:
        widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
        lines += [title] if title else []
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [*lines, *(["..."] if len(grids) > MOST_GRIDS else []), *pieces.empty[:MOST_GRIDS]]


def _sides(pieces: Pieces) -> tuple[int | None, int | None]:
    """Return the dims of the rows and of the columns: sharded dims first."""
    dims = sorted([*pieces.cut, *(d for d in range(len(pieces.names)) if d not in pieces.cut)][:2])
    return (dims[0] if dims else None), (dims[1] if len(dims) > 1 else None)


def _grids(pieces: Pieces) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield, for each choice of segments of the other dims, a title and a table; its first column names rows."""
    down, across = _sides(pieces)
    rest = [d for d in range(len(pieces.names)) if d not in (down, across)]
    for others in product(*(pieces.segments[d] for d in rest)):
        fixed = dict(zip(rest, others, strict=True))
        title = ", ".join(f"{pieces.names[d]} {s}" for d, s in fixed.items() if len(pieces.segments[d]) > 1)
        rows, columns = _side(pieces, down), _side(pieces, across)
        shown, wide = rows[:MOST_ROWS], columns[:MOST_COLUMNS]
        head = ["", pieces.names[across] if across is not None else ""]
        cells = [[*head, *map(_named, wide), *_more(columns, wide, "columns")]] if across is not None else []
        for at, row in enumerate(shown):
            chosen = [_chosen(pieces, {**fixed, down: row, across: column}) for column in wide]
            name = pieces.names[down] if at == 0 and down is not None else ""
            held = [_held(pieces, c) for c in chosen]
            cells.append([name, _named(row), *held, *([""] if len(columns) > len(wide) else [])])
        if len(rows) > len(shown):
            cells.append(["", *_more(rows, shown, "rows"), *[""] * (len(cells[-1]) - 2)])
        yield title, cells


def _side(pieces: Pieces, dim: int | None) -> Sequence[Segment]:
    return pieces.segments[dim] if dim is not None else (Segment(0, 1),)


def _named(segment: Segment) -> str:
    return str(segment) if segment != Segment(0, 1) else ""


def _more(every: Sequence[Segment], shown: Sequence[Segment], what: str) -> list[str]:
    return [f"… {len(every) - len(shown)} more {what}"] if len(every) > len(shown) else []


def _chosen(pieces: Pieces, fixed: dict[int | None, Segment]) -> list[Segment]:
    return [fixed[d] for d in range(len(pieces.names))]


def _held(pieces: Pieces, chosen: Sequence[Segment]) -> str:
    """Return the ranks of a piece as text."""
    sign = JOINED[next((op for _, op in pieces.spec.layout.partial), "sum")]
    holders = [sign.join(map(str, ranks)) for ranks in pieces.holders(chosen)]
    if len(holders) > MOST_HOLDERS:
        return f"{', '.join(holders[:2])} … {holders[-1]} ({len(holders)})"
    return ", ".join(holders)


def _svg(pieces: Pieces) -> str:
    """Return the first grids below each other; the colour of a piece is that of its first rank."""
    grids = [cells for _, cells in islice(_grids(pieces), MOST_GRIDS)]
    titles = [title for title, _ in islice(_grids(pieces), MOST_GRIDS)]
    parts, y = [_label(8, 18, line_, False) for line_ in ["; ".join(_head(pieces.spec))]], float(TOP)
    for title, cells in zip(titles, grids, strict=True):
        parts += [_label(8, y, title, False)] if title else []
        for row in cells:
            y += HIGH
            parts += [_label(8, y - 12, row[0], False), _label(LEFT - 8, y - 12, row[1], True)]
            parts += [part for at, cell in enumerate(row[2:]) for part in _cell(LEFT + at * CELL, y - HIGH, cell)]
        y += 20
    for said in pieces.empty[:MOST_GRIDS]:
        parts.append(_label(8, y, said, False))
        y += 16
    wide = max([640.0, *(LEFT + CELL * (len(cells[0]) - 2) + 8.0 for cells in grids)])
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {wide:.0f} {y:.0f}",
        width=int(wide),
        role="img",
        aria_label=repr(pieces.spec),
        font_family="system-ui, sans-serif",
        font_size=13,
    )


def _label(x: float, y: float, text: str, right: bool) -> Markup:
    return element("text", text, x=int(x), y=int(y), fill="currentColor", text_anchor="end" if right else None)


def _cell(x: float, y: float, held: str) -> Iterator[Markup]:
    """Yield the elements of a piece; a cell without a rank, such as a column's name, has no box."""
    if not held:
        return
    first = held.replace("^", "+").partition("+")[0].partition(",")[0]
    boxed = first.isdecimal()
    if boxed:
        colour = COLOURS[int(first) % len(COLOURS)]
        yield element("rect", x=int(x), y=int(y), width=CELL - 4, height=HIGH - 4, rx=3, fill=colour, stroke="#57606a")
    ink = "#1b1f24" if boxed else "currentColor"
    yield element("text", held, x=int(x + (CELL - 4) / 2), y=int(y + HIGH / 2 + 3), fill=ink, text_anchor="middle")
