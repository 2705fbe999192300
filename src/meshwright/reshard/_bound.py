"""The least that a rank must receive, whatever carries it."""

from __future__ import annotations

from meshwright.layout import Spec

from ._factors import common_factors
from ._path import Manner, landing_of
from ._regions import box_of, lacking, meet, volume


def lower_bound(src: Spec, dst: Spec, rank: int) -> int:
    """Bytes that `rank` cannot do without.

    Without terms to join: what it needs and does not hold. Terms are joined by n ranks (those along the joined axes)
    element by element: an element that k of them need costs each of these (n - 1) / k terms for its share of the
    work, and the joined value where another did the work. So an all-reduce of N bytes costs 2 (n - 1) N / n, and a
    reduce-scatter to N / n costs (n - 1) N / n. What ends partial needs no more than its parts.
    """
    if rank not in dst.mesh:
        return 0
    both = common_factors(src, dst) or (src, dst)
    src, dst = both
    if src.mesh is not dst.mesh:
        return lacking(dst, src, rank) * src.dtype.itemsize
    landed, joined = landing_of(src, dst, Manner(cut_terms=True))
    if not joined:
        return lacking(landed, src, rank) * src.dtype.itemsize
    held, need = box_of(src, rank), box_of(landed, rank)
    group = src.mesh.group(rank, joined)
    mine = volume(meet(held, need))
    sharing = sum(box_of(landed, r) == need for r in group)
    work = (len(group) - 1) * mine + sharing * volume(need) - mine
    return -(-work * src.dtype.itemsize // sharing)
