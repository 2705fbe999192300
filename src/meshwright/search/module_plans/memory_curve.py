"""Memory of a rank over time under a plan for a module: the forward pass, and then the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.graph import Node

from ..plan_data.account import MemoryCurve
from ..sharding.conversion_prices import Prices
from ..sharding.memory_model import MemoryModel, make_anew
from ..sharding.sharding_search import Shardings, relative_passes


def memory_curve(cuts: Shardings, prices: Prices, seconds: float) -> MemoryCurve:
    """Return the bytes of every rank over a step of `seconds`; for a batch in pieces, over one piece.

    Communication is spread over the step: operators give the relative times, and the plan's account gives the total.
    """
    kept = MemoryModel(cuts.facts, prices, make_anew)
    base = sum(kept.held(v, cuts.forms[v]) for v in cuts.forms if v in cuts.facts.given)
    recomputed = kept.of_layers(cuts.options, cuts.forms).values()
    base += kept.temporary_bytes(cuts.options, cuts.forms) - max(recomputed, default=0.0)
    now, at, points = base, 0.0, [(0.0, base)]
    for took, more in _changes(cuts, kept):
        at, now = at + took, now + more
        points.append((at, now))
    scale = seconds / at if at else 1.0
    return MemoryCurve("every rank", tuple((when * scale, held) for when, held in points))


def _changes(cuts: Shardings, kept: MemoryModel) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each operator, and the change of the held bytes after it."""
    layers, made = kept.of_layers(cuts.options, cuts.forms), dict[Node, float]()
    for row in cuts.facts.rows:
        option, node = cuts.options[row.node], row.node
        made[node] = kept.made_at(row, option, cuts.forms)
        yield option.seconds * (1 / relative_passes(node, kept)), made[node]
    inside = ""
    for node, option in reversed([*cuts.options.items()]):
        layer = kept.dropped.layers.get(node) or ""
        if layer != inside:
            yield 0.0, layers.get(layer, 0.0) - layers.get(inside, 0.0)
        inside = layer
        yield option.seconds * (1 - 1 / relative_passes(node, kept)), -made[node]
    yield 0.0, -layers.get(inside, 0.0)
