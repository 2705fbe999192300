"""Boxes of local tensors: functions that take boxes out of a tensor, and functions that assemble them to a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from meshwright.layout import Range

from ._mover import Shape
from ._regions import Box, index, volume

Part = Callable[[Tensor], Tensor]
"""Function from a tensor to a part of it."""
Parts = Callable[[Tensor], list[Tensor]]
"""Function from a tensor to several tensors with its dtype and on its device."""
Join = Callable[[list[Tensor], Tensor], Tensor]
"""Function from parts, and a tensor that has their dtype and device, to the assembled tensor."""


def empty_result(shape: Shape) -> Join:
    return lambda parts, t: away_part(shape, t.dtype, t.device)


def away_part(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the local tensor of a rank outside the mesh: it has no elements, or a dummy element if it has no dims.

    torch converts a tensor to a number only if it has one element. The dummy is NaN or the lowest integer, so that a
    call that reads it by mistake is noticed.
    """
    if 0 in shape or dtype is torch.bool:
        return torch.empty(shape, dtype=dtype, device=device)
    least = torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
    return torch.full(shape, least, dtype=dtype, device=device)


def take_box(box: Box, held: Box) -> Part:
    """Return a function that takes `box` as a view out of a tensor that holds the box `held`."""
    cut = _cut_dims([box], held)
    if not cut:
        return lambda t: t
    if len(cut) == 1:
        (dim,) = cut
        start, length = box[dim][0] - held[dim][0], box[dim][1]
        return lambda t: t.narrow(dim, start, length)
    where = index(box, held)
    return lambda t: t[where]


def take_boxes(boxes: Sequence[Box], held: Box) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function that takes all boxes out of a tensor that holds `held`; adjacent boxes need one `split`."""
    cut = _cut_dims(boxes, held)
    if len(cut) == 1 and _are_adjacent([box[cut[0]] for box in boxes], held[cut[0]]):
        (dim,) = cut
        sizes = [box[dim][1] for box in boxes]
        return lambda t: t.split(sizes, dim)
    takes = [take_box(box, held) for box in boxes]
    return lambda t: [take(t) for take in takes]


def _cut_dims(boxes: Sequence[Box], whole: Box) -> list[int]:
    """Return the dims along which some box is only a part of `whole`."""
    return [dim for dim, extent in enumerate(whole) if any(box[dim] != extent for box in boxes)]


def _are_adjacent(ranges: Sequence[Range], whole: Range) -> bool:
    """True if the ranges follow each other without gaps, from the start to the end of `whole`."""
    ends = list(accumulate((length for _, length in ranges), initial=whole[0]))
    return [start for start, _ in ranges] == ends[:-1] and ends[-1] == sum(whole)


def shape_of(box: Box) -> Shape:
    return tuple([n for _, n in box])


def assembly(boxes: Sequence[Box], target: Box) -> Join:
    """Return a function that assembles parts with the given `boxes` to `target`, by one `cat` if possible."""
    full = [i for i, box in enumerate(boxes) if volume(box)]
    if not full:
        return empty_result(shape_of(target))
    if len(full) == 1:
        (only,) = full
        return lambda parts, t: parts[only]
    cut = _cut_dims([boxes[i] for i in full], target)
    return _concatenation(boxes, full, cut[0]) if len(cut) == 1 else _copies(boxes, full, target)


def gathered_parts(boxes: Sequence[Box], target: Box) -> tuple[Parts, Join]:
    """Return functions that allocate parts with the given `boxes`, and assemble them to `target`.

    Parts that are consecutive rows of the target are allocated as views of it. Then the assembly copies nothing.
    """
    if _cut_dims(boxes, target) == [0] and _are_adjacent([box[0] for box in boxes], target[0]):
        shape, rows = shape_of(target), [box[0][1] for box in boxes]
        return lambda t: list(t.new_empty(shape).split(rows)), lambda parts, t: _whole_of_rows(parts, shape)
    return allocation(list(map(shape_of, boxes))), assembly(boxes, target)


def _whole_of_rows(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """Return the contiguous tensor of this shape that the parts are consecutive rows of."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return parts[0].as_strided(shape, strides, 0)


def allocation(shapes: Sequence[Shape]) -> Parts:
    """Return a function that allocates tensors of these shapes, with the dtype and on the device of its argument."""
    return lambda t: [t.new_empty(shape) for shape in shapes]


def _concatenation(boxes: Sequence[Box], full: Sequence[int], dim: int) -> Join:
    """Return a function that concatenates the parts with indices `full` along a dim, in the order of their boxes."""
    order = sorted(full, key=lambda i: boxes[i][dim])
    if order == list(range(len(boxes))):
        return lambda parts, t: torch.cat(parts, dim)
    return lambda parts, t: torch.cat([parts[i] for i in order], dim)


def _copies(boxes: Sequence[Box], full: Sequence[int], target: Box) -> Join:
    """Return a function that copies the parts with indices `full` into a new tensor, each to its box."""
    shape = shape_of(target)
    places = [(i, index(boxes[i], target)) for i in full]

    def copy(parts: list[Tensor], t: Tensor) -> Tensor:
        out = t.new_empty(shape)
        for i, where in places:
            out[where] = parts[i]
        return out

    return copy
