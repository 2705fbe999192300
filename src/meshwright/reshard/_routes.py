"""Who sends which box to whom: every needed element comes from one holder."""

from __future__ import annotations

from functools import lru_cache

from meshwright.layout import Spec

from ._regions import Box, blocks, box_of, ranks_at, volume

Route = tuple[int, Box]
"""The rank at the other end, and the box."""


class Routes:
    """All messages of one movement: what each rank receives and sends, boxes in global coordinates.

    A rank that holds an element itself keeps it (its own rank is then the other end). Otherwise the element comes
    from the holder that has sent least so far, and among equals from the nearest in the order of the ranks.
    """

    def __init__(self, src: Spec, dst: Spec, group: tuple[int, ...]) -> None:
        self.receives: dict[int, list[Route]] = {rank: [] for rank in group}
        self.sends: dict[int, list[Route]] = {rank: [] for rank in group}
        place = {rank: at for at, rank in enumerate(group)}
        load = dict.fromkeys(group, 0)
        known: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in group:
            if rank not in dst.mesh:
                continue
            for at, box in blocks(src, box_of(dst, rank)):
                key = tuple(at.items())
                if key not in known:
                    known[key] = [r for r in ranks_at(src.mesh, at) if r in place]
                self._add(rank, known[key], box, load, place)
        self.silent = not any(self.sends.values())

    def _add(self, rank: int, holders: list[int], box: Box, load: dict[int, int], place: dict[int, int]) -> None:
        if rank in holders:
            self.receives[rank].append((rank, box))
            return
        holder = holders[0]
        if len(holders) > 1:
            holder = min(holders, key=lambda r: (load[r], abs(place[r] - place[rank]), place[r]))
        load[holder] += volume(box)
        self.receives[rank].append((holder, box))
        self.sends[holder].append((rank, box))


@lru_cache(maxsize=1024)
def routes(src: Spec, dst: Spec, group: tuple[int, ...]) -> Routes:
    """The routes that take a tensor from `src` to `dst` among the ranks of `group`; the same on every rank."""
    return Routes(src, dst, group)
