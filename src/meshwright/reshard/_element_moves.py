"""Moves of elements: a conversion as boxes that ranks send each other, which can be cut into pieces.

A plan converts a whole tensor at once. Here every needed element is sent once, by one holder, straight from the local
tensor of the source into that of the target. So a conversion can be made piece by piece, with little memory beside both
local tensors, and pieces of several tensors can share a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from meshwright.layout import Spec

from ._errors import ReshardError
from ._factors import common_factors
from ._mover import Group, Shape
from ._regions import Box, box_of, index, volume
from ._routes import Route, routes

Where = tuple[slice, ...]
"""A box of a local tensor."""


class ElementMoves:
    """The moves of the elements of one tensor from `src` to `dst`, on one mesh or across two.

    Local tensors have the shapes `shape_before` and `shape_after`, in which a product dim is split into its factors.
    Each box can be cut into `pieces` along its longest dim; a piece may be empty. All ranks derive the same moves.

    Raises:
        ReshardError: a layout has a pending reduction, or a dim has no common factors.
    """

    def __init__(self, src: Spec, dst: Spec) -> None:
        both = None if src.layout.partial or dst.layout.partial else common_factors(src, dst)
        if both is None:
            raise _no_boxes(src, dst)
        self.src, self.dst = both
        one_mesh, ranks = src.mesh is dst.mesh, src.mesh.process_ids
        self.group: Group = ranks if one_mesh else tuple(sorted({*ranks, *dst.mesh.process_ids}))

    def shape_before(self, rank: int) -> Shape:
        return self.src.local_shape(rank)

    def shape_after(self, rank: int) -> Shape:
        return self.dst.local_shape(rank)

    @cached_property
    def same_parts(self) -> bool:
        """True if both sides have the same ranks, and each rank holds the same elements on both."""
        ranks = self.dst.mesh.process_ids
        return {*ranks} == {*self.src.mesh.process_ids} and all(
            box_of(self.src, rank) == box_of(self.dst, rank) for rank in ranks
        )

    @cached_property
    def most_pieces(self) -> int:
        """Largest number of pieces into which a sent box can be cut."""
        return max((n for rank in self.group for _, box in self._sent(rank) for _, n in box), default=1)

    def sends(self, rank: int, at: int = 0, pieces: int = 1) -> list[tuple[int, Where]]:
        """Return the receiver of each box that `rank` sends in piece `at`, and its place in the local tensor."""
        return _placed(self._sent(rank), box_of(self.src, rank), at, pieces)

    def receives(self, rank: int, at: int = 0, pieces: int = 1) -> list[tuple[int, Where]]:
        """Return the sender of each box that `rank` receives in piece `at`, and its place in the new local tensor."""
        return _placed(self._received(rank), box_of(self.dst, rank), at, pieces)

    def keeps(self, rank: int) -> list[tuple[Where, Where]]:
        """Return the place of each box that `rank` holds before and after, in both local tensors."""
        found = routes(self.src, self.dst, self.group).receives(rank)
        held, need = box_of(self.src, rank), box_of(self.dst, rank)
        return [(index(box, held), index(box, need)) for peer, box in found if peer == rank and volume(box)]

    def traffic(self, pieces: int = 1) -> dict[int, int]:
        """Return the elements that each rank sends and receives in the first piece, which is the largest one."""
        found: dict[int, int] = {}
        for rank in self.group:
            boxes = [box for _, box in (*self._sent(rank), *self._received(rank))]
            found[rank] = sum(volume(_piece(box, 0, pieces)) for box in boxes)
        return found

    def _sent(self, rank: int) -> Sequence[Route]:
        return routes(self.src, self.dst, self.group).sends(rank)

    def _received(self, rank: int) -> Sequence[Route]:
        found = routes(self.src, self.dst, self.group).receives(rank)
        return [(peer, box) for peer, box in found if peer != rank]


@lru_cache(maxsize=4096)
def element_moves(src: Spec, dst: Spec) -> ElementMoves:
    """Return the moves of the elements from `src` to `dst`.

    >>> from meshwright.layout import ProcessMesh, parse_spec
    >>> mesh = ProcessMesh([0, 1], ["tp"])
    >>> moves = element_moves(parse_spec("f32[4@tp, 2]", mesh), parse_spec("f32[4, 2@tp]", mesh))
    >>> moves.sends(0), moves.traffic(pieces=2)
    ([(1, (slice(0, 2, None), slice(1, 2, None)))], {0: 2, 1: 2})
    """
    return ElementMoves(src, dst)


def _placed(found: Sequence[Route], held: Box, at: int, pieces: int) -> list[tuple[int, Where]]:
    cut = [(peer, _piece(box, at, pieces)) for peer, box in found]
    return [(peer, index(box, held)) for peer, box in cut if volume(box)]


def _piece(box: Box, at: int, pieces: int) -> Box:
    """Return piece `at` of a box, cut along its longest dim into pieces of equal length; the last ones may be empty.

    >>> [_piece(((4, 5), (0, 3)), at, 2) for at in range(2)]
    [((4, 3), (0, 3)), ((7, 2), (0, 3))]
    """
    if pieces == 1:
        return box
    dim = max(range(len(box)), key=lambda d: box[d][1])
    start, length = box[dim]
    step = -(-length // pieces)
    begin = min(at * step, length)
    return (*box[:dim], (start + begin, min(step, length - begin)), *box[dim + 1 :])


def _no_boxes(src: Spec, dst: Spec) -> ReshardError:
    pending = src.layout.partial or dst.layout.partial
    return ReshardError(
        f"moves of elements from {src} to {dst}",
        "a pending reduction" if pending else "a dim whose parts have no common factors",
        "ranks hold terms of the elements" if pending else "the ranks hold parts that are not boxes of one shape",
        "call mw.reshard first, to a layout without Partial and with the same factors",
    )
