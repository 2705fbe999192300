"""Division of layers over the ranks of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import Numbers


class LayerShare(NamedTuple):
    """Layers of one rank: those without experts, which come first in a model, and those with experts."""

    dense: Numbers
    sparse: Numbers


def shares(layers: int, dense: int, ranks: Numbers) -> tuple[LayerShare, LayerShare, LayerShare]:
    """Return the layers of the first rank, of the largest other rank, and of the last rank.

    `dense` of the `layers` have no experts.
    """
    counted = _counts(layers, ranks)
    before = (np.zeros(()), np.where(ranks > 1, counted[0], 0), layers - counted[2])
    out: list[LayerShare] = []
    for count, done in zip(counted, before, strict=True):
        own = np.minimum(np.maximum(dense - done, 0.0), count)
        out.append(LayerShare(own, count - own))
    return out[0], out[1], out[2]


def _counts(layers: int, ranks: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the numbers of layers of the first rank, of the largest other rank, and of the last rank.

    They are equal if possible. If two more layers would make them equal, the first and the last rank have one layer
    less.

    >>> [float(n) for n in _counts(30, 8.0)]
    [3.0, 4.0, 3.0]
    """
    p = np.asarray(ranks, dtype=float)
    even, ends = np.mod(layers, p) == 0, np.mod(layers + 2, p) == 0
    most = np.where(even, layers / p, np.where(ends, (layers + 2) / p, np.ceil(layers / p)))
    least = np.where(even, layers / p, np.where(ends, most - 1, np.floor(layers / p)))
    return np.where(even | ~ends, most, least), most, least
