"""Show the layout of a tensor on its mesh, or of the parameters of a model, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from torch import Tensor, nn

from meshwright.layout import MeshwrightError, ProcessMesh, Spec, parse_spec, write_dtype
from meshwright.search import size, text_table
from meshwright.tensor import DistTensor

from ._html import Markup, element, table
from ._pieces import Segment, TensorPieces

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
        return "\n".join(_text(TensorPieces.of(self.spec)))

    __repr__ = __str__

    @property
    def svg(self) -> str:
        """Return the picture as self-contained SVG."""
        return _svg(TensorPieces.of(self.spec))

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, repr=False)
class Listing:
    """A table of a model's parameters and buffers: layouts, and bytes of the whole tensor and of a rank's part."""

    title: str
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *text_table([_HEAD, *self.rows], _NUMBERS)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table(self.title, _HEAD, self.rows, _NUMBERS)


_HEAD = ("name", "layout", "whole", "per rank")
_NUMBERS = {2, 3}


def show(x: object, mesh: ProcessMesh | None = None) -> Picture | Listing:
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
        _description(x),
        "the object is on no mesh",
        'pass a DistTensor, its spec, a model, or call show("f32[8@dp, 16]", mesh)',
    )


def _description(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a plain tensor of shape {tuple(x.shape)}"
    return f"the text {x!r} without a mesh" if isinstance(x, str) else f"a {type(x).__name__}"


def _listing(model: nn.Module) -> Listing:
    held = [*model.named_parameters(), *model.named_buffers()]
    rows, whole, part = list[tuple[str, ...]](), 0, 0
    for name, x in held:
        spec = x.spec if isinstance(x, DistTensor) else None
        full = spec.nbytes if spec is not None else x.numel() * x.element_size()
        own = _largest_part(spec) if spec is not None else full
        lies = repr(spec) if spec is not None else f"{write_dtype(x.dtype)}{list(x.shape)} plain"
        rows.append((name, lies, size(full), size(own)))
        whole, part = whole + full, part + own
    meshes = dict.fromkeys(x.mesh for _, x in held if isinstance(x, DistTensor))
    where = ", ".join(map(repr, islice(meshes, 4))) or "no mesh"
    title = f"{type(model).__name__} on {where}{' and others' if len(meshes) > 4 else ''}"
    return Listing(title, (*rows, ("total", "", size(whole), size(part))))


def _largest_part(spec: Spec) -> int:
    """Return the bytes of the largest part, which is that of the first rank."""
    return prod(spec.concrete.local_shape(spec.mesh.process_ids[0])) * spec.dtype.itemsize


def _head_lines(spec: Spec) -> list[str]:
    return [f"{spec!r} on {spec.mesh!r}", f"a rank holds at most {size(_largest_part(spec))} of {size(spec.nbytes)}"]


def _text(pieces: TensorPieces) -> list[str]:
    grids = list(islice(_grids(pieces), MOST_GRIDS + 1))
    lines = _head_lines(pieces.spec)
    for title, cells in grids[:MOST_GRIDS]:
        lines += [*([title] if title else []), *text_table(cells)]
    return [*lines, *(["..."] if len(grids) > MOST_GRIDS else []), *pieces.empty[:MOST_GRIDS]]


def _side_dims(pieces: TensorPieces) -> tuple[int | None, int | None]:
    """Return the dims of the rows and of the columns: sharded dims first."""
    dims = sorted([*pieces.cut, *(d for d in range(len(pieces.names)) if d not in pieces.cut)][:2])
    return (dims[0] if dims else None), (dims[1] if len(dims) > 1 else None)


def _grids(pieces: TensorPieces) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield, for each choice of segments of the other dims, a title and a table; its first column names rows."""
    down, across = _side_dims(pieces)
    rest = [d for d in range(len(pieces.names)) if d not in (down, across)]
    for others in product(*(pieces.segments[d] for d in rest)):
        fixed = dict(zip(rest, others, strict=True))
        title = ", ".join(f"{pieces.names[d]} {s}" for d, s in fixed.items() if len(pieces.segments[d]) > 1)
        yield title, _cells(pieces, fixed, down, across)


def _cells(pieces: TensorPieces, fixed: dict[int, Segment], down: int | None, across: int | None) -> list[list[str]]:
    """Return the table of the pieces in `fixed` segments of all dims but two; a row names the columns."""
    rows, columns = _side_segments(pieces, down), _side_segments(pieces, across)
    shown_rows, shown_columns = rows[:MOST_ROWS], columns[:MOST_COLUMNS]
    more_columns = _more_text(columns, shown_columns, "columns")
    cells: list[list[str]] = []
    if across is not None:
        cells.append(["", pieces.names[across], *map(_segment_text, shown_columns), *more_columns])
    name = pieces.names[down] if down is not None else ""
    for row in shown_rows:
        held = [_holders_text(pieces, {**fixed, down: row, across: column}) for column in shown_columns]
        cells.append([name, _segment_text(row), *held, *[""] * len(more_columns)])
        name = ""
    if len(rows) > len(shown_rows):
        cells.append(["", *_more_text(rows, shown_rows, "rows"), *[""] * (len(cells[-1]) - 2)])
    return cells


def _side_segments(pieces: TensorPieces, dim: int | None) -> Sequence[Segment]:
    return pieces.segments[dim] if dim is not None else (Segment(0, 1),)


def _segment_text(segment: Segment) -> str:
    return str(segment) if segment != Segment(0, 1) else ""


def _more_text(every: Sequence[Segment], shown: Sequence[Segment], what: str) -> list[str]:
    return [f"… {len(every) - len(shown)} more {what}"] if len(every) > len(shown) else []


def _holders_text(pieces: TensorPieces, segments: dict[int | None, Segment]) -> str:
    """Return the ranks of the piece in these segments as text."""
    sign = JOINED[next((op for _, op in pieces.spec.layout.partial), "sum")]
    chosen = [segments[d] for d in range(len(pieces.names))]
    holders = [sign.join(map(str, ranks)) for ranks in pieces.holders(chosen)]
    if len(holders) > MOST_HOLDERS:
        return f"{', '.join(holders[:2])} … {holders[-1]} ({len(holders)})"
    return ", ".join(holders)


def _svg(pieces: TensorPieces) -> str:
    """Return the first grids below each other; the colour of a piece is that of its first rank."""
    grids = list(islice(_grids(pieces), MOST_GRIDS))
    parts, y = [_label(8, 18, "; ".join(_head_lines(pieces.spec)), False)], float(TOP)
    for title, cells in grids:
        parts += _drawn_grid(title, cells, y)
        y += HIGH * len(cells) + 20
    for said in pieces.empty[:MOST_GRIDS]:
        parts.append(_label(8, y, said, False))
        y += 16
    wide = max([640.0, *(LEFT + CELL * (len(cells[0]) - 2) + 8.0 for _, cells in grids)])
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


def _drawn_grid(title: str, cells: list[list[str]], y: float) -> Iterator[Markup]:
    """Yield the elements of a grid whose first row begins at height `y`."""
    if title:
        yield _label(8, y, title, False)
    for n, row in enumerate(cells):
        top = y + n * HIGH
        yield _label(8, top + HIGH - 12, row[0], False)
        yield _label(LEFT - 8, top + HIGH - 12, row[1], True)
        for at, cell in enumerate(row[2:]):
            yield from _drawn_cell(LEFT + at * CELL, top, cell)


def _label(x: float, y: float, text: str, right: bool) -> Markup:
    return element("text", text, x=int(x), y=int(y), fill="currentColor", text_anchor="end" if right else None)


def _drawn_cell(x: float, y: float, held: str) -> Iterator[Markup]:
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
