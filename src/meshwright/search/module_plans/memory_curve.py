"""Memory of a rank over time under a plan for a module: the forward pass, and then the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.graph import Node

from ..plan_data.account import MemoryCurve
from ..sharding.conversion_prices import Prices
from ..sharding.memory_model import MemoryModel
from ..sharding.sharding_search import BACKWARD, Shardings


def memory_curve(cuts: Shardings, prices: Prices, seconds: float) -> MemoryCurve:
    """Return the bytes of every rank over a step of `seconds`; for a batch in pieces, over one piece.

    Communication is spread over the step: operators give the relative times, and the plan's account gives the total.
    """
    kept = MemoryModel(cuts.program, prices, _anew)
    base = sum(kept.held(v, cuts.forms[v]) for v in kept.given if v in cuts.forms)
    base += kept.passing(cuts.options, cuts.forms) - max(kept.of_layers(cuts.options, cuts.forms).values(), default=0.0)
    now, at, points = base, 0.0, [(0.0, base)]
    for took, more in _changes(cuts, kept):
        at, now = at + took, now + more
        points.append((at, now))
    scale = seconds / at if at else 1.0
    return MemoryCurve("every rank", tuple((when * scale, held) for when, held in points))


def _changes(cuts: Shardings, kept: MemoryModel) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each operator, and the change of the held bytes after it."""
    layers, made = kept.of_layers(cuts.options, cuts.forms), dict[Node, float]()
    for node, option in cuts.options.items():
        made[node] = kept.made_at(node, option, cuts.forms)
        yield option.seconds * _forward(node, kept), made[node]
    inside = ""
    for node, option in reversed([*cuts.options.items()]):
        layer = kept.dropped.layer(node) or ""
        if layer != inside:
            yield 0.0, layers.get(layer, 0.0) - layers.get(inside, 0.0)
        inside = layer
        yield option.seconds * (1 - _forward(node, kept)), -made[node]
    yield 0.0, -layers.get(inside, 0.0)


def _forward(node: Node, kept: MemoryModel) -> float:
    """Return the fraction of an operator's seconds that its forward pass takes."""
    if not any(v in kept.trains for v in node.outs):
        return 1.0
    return 1 / (1 + BACKWARD + (kept.dropped.layer(node) is not None))


def _anew(key: Any, make: Callable[[], Any]) -> Any:
    return make()
