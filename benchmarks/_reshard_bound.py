"""Lower bound of the bytes that a rank must receive in a conversion, for any algorithm."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from meshwright.layout import Spec
from meshwright.reshard._factors import bridge, common_factors
from meshwright.reshard._path import Manner, landing_of
from meshwright.reshard._regions import box_of, lacking, meet, volume


def lower_bound(src: Spec, dst: Spec, rank: int | None = None) -> int:
    """Return a lower bound of the bytes that `rank` receives; without a rank, that of the busiest rank.

    Without terms to join, the bound is the part that the rank needs and does not hold. Otherwise n ranks hold terms of
    the same elements. Each joins its share, 1/n of the needed elements, which costs n - 1 terms per element, and
    receives its other needed elements. So a reduce-scatter of N bytes costs (n - 1) N / n, an all-reduce twice that.

    A result that stays partial needs only its local terms. If the work is shared in other ways, the busiest rank
    receives at least the mean, and at least what it needs. A dim that both layouts factor differently counts as held
    whole, so the bound may be low.
    """
    src, dst = common_factors(src, dst) or common_factors(bridge(src, dst), dst) or (src, dst)
    if src.mesh is not dst.mesh:
        return _bound(src, dst, (), rank)
    ways = [landing_of(src, dst, Manner(cut_terms=dim)) for dim in (None, *range(src.ndim))]
    return min(_bound(src, landed, joined, rank) for landed, joined in ways)


def _bound(src: Spec, landed: Spec, joined: tuple[str, ...], rank: int | None) -> int:
    if rank is not None:
        return ceil(_least(src, landed, joined, rank))
    ranks = landed.mesh.process_ids
    each = [_least(src, landed, joined, r) for r in ranks]
    if not joined:
        return ceil(max(each))
    most = max(volume(box_of(landed, r)) for r in ranks) * src.dtype.itemsize
    return max(ceil(sum(each) / len(ranks)), most)


def _least(src: Spec, landed: Spec, joined: tuple[str, ...], rank: int) -> Fraction:
    if not joined or rank not in src.mesh:
        return Fraction(lacking(landed, src, rank) * src.dtype.itemsize)
    held, need = box_of(src, rank), box_of(landed, rank)
    group = src.mesh.group(rank, joined)
    needed = {box_of(landed, r) for r in src.mesh.group(rank, [*joined, *src.layout.cut_axes])}
    share = Fraction(sum(volume(meet(box, held)) for box in needed), len(group))
    sharing = sum(box_of(landed, r) == need for r in group)
    kept = Fraction(volume(meet(held, need)), sharing)
    return ((len(group) - 1) * share + volume(need) - kept) * src.dtype.itemsize
