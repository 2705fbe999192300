"""Routes: the boxes that ranks send to each other; every needed element is sent by one holder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from meshwright.layout import Spec

from ._regions import Box, blocks, box_of, lacking, ranks_at, volume

Route = tuple[int, Box]
"""The peer rank, and the box in global coordinates."""
Moves = dict[int, list[Route]]


class Routes:
    """The messages of one conversion among the ranks of `group`, at most one from one rank to another.

    A rank that holds an element itself keeps it; the route then names its own rank. If several ranks hold an element,
    the sender is the one that has sent least so far, and among equals the nearest in the group. All ranks derive the
    same routes. `fixed` are the coordinates that the ranks of the group share.
    """

    def __init__(self, src: Spec, dst: Spec, group: tuple[int, ...], fixed: Mapping[str, int]) -> None:
        self.src, self.dst, self.group, self.fixed = src, dst, group, dict(fixed)

    @cached_property
    def silent(self) -> bool:
        """True if every rank of the group holds everything that it needs."""
        return not any(lacking(self.dst, self.src, rank) for rank in self.group)

    def receives(self, rank: int) -> list[Route]:
        """Return the source rank of each box that `rank` needs, including boxes that it holds itself."""
        if rank not in self.dst.mesh:
            return []
        if self._has_copies:
            return self._balanced_moves[0][rank]
        return [(self._holders(at)[0], box) for at, box in blocks(self.src, box_of(self.dst, rank))]

    def sends(self, rank: int) -> list[Route]:
        """Return the boxes that `rank` sends to other ranks."""
        if rank not in self.src.mesh:
            return []
        if self._has_copies:
            return self._balanced_moves[1][rank]
        met = blocks(self.dst, box_of(self.src, rank))
        return [(peer, box) for at, box in met for peer in ranks_at(self.dst.mesh, self.fixed | at) if peer != rank]

    @cached_property
    def _has_copies(self) -> bool:
        """True if several ranks of the group hold the same elements."""
        free = set(self.src.mesh.dim_names) - set(self.src.layout.cut_axes) - set(self.fixed)
        return any(self.src.mesh.sizes[a] > 1 for a in free)

    def _holders(self, at: Mapping[str, int]) -> tuple[int, ...]:
        return ranks_at(self.src.mesh, self.fixed | dict(at))

    @cached_property
    def _balanced_moves(self) -> tuple[Moves, Moves]:
        """All receives and sends, with senders chosen to balance the load."""
        receives: Moves = {rank: [] for rank in self.group}
        sends: Moves = {rank: [] for rank in self.group}
        place = {rank: at for at, rank in enumerate(self.group)}
        load = dict.fromkeys(self.group, 0)
        known: dict[tuple[tuple[str, int], ...], tuple[int, ...]] = {}
        for rank in self.group:
            needed = blocks(self.src, box_of(self.dst, rank)) if rank in self.dst.mesh else []
            for at, box in needed:
                key = tuple(at.items())
                holders = known[key] = known.get(key) or self._holders(at)
                if rank in holders:
                    receives[rank].append((rank, box))
                    continue
                holder = min(holders, key=lambda r: (load[r], abs(place[r] - place[rank]), place[r]))
                load[holder] += volume(box)
                receives[rank].append((holder, box))
                sends[holder].append((rank, box))
        return receives, sends


@lru_cache(maxsize=1024)
def routes(src: Spec, dst: Spec, group: tuple[int, ...]) -> Routes:
    """Return the routes from `src` to `dst` among the ranks of `group`, on one mesh or across two."""
    return Routes(src, dst, group, _shared_coordinates(src, dst, group))


def _shared_coordinates(src: Spec, dst: Spec, group: tuple[int, ...]) -> dict[str, int]:
    """Return the coordinates that all ranks of the group share; empty across two meshes."""
    if src.mesh is not dst.mesh:
        return {}
    first = src.mesh.coordinate(group[0])
    last = src.mesh.coordinate(group[-1])
    return {a: i for a, i in first.items() if last[a] == i}
