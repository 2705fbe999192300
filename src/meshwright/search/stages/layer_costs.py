"""Seconds and bytes of each layer of a chain; those of a pipeline chunk are sums over its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from meshwright.cost import Numbers as Amounts
from meshwright.graph import Node, Value
from meshwright.pipeline import ChunkMemory, Times

from ..sharding.conversion_prices import Prices
from ..sharding.memory_model import MemoryModel, make_anew
from ..sharding.sharding_search import BACKWARD, Shardings, relative_passes
from ..sharding.variable_elimination import Costs
from .layer_chain import Chain

Numbers = tuple[float, ...]
ONCE = "gathers", "reduced", "shared"
"""Costs that occur once in a step, in the order of the arguments of `LinkTimes.once`."""


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of a message between stages, and of reducing gradients over replicas, as functions of bytes."""

    message: Callable[[Amounts], Amounts]
    reduced: Callable[[Amounts], Amounts]

    def once(self, gathers: Amounts, reduced: Amounts, shared: Amounts) -> Amounts:
        """Return the seconds of a stage's work that is done once in a step.

        Its weights are gathered, its gradients are reduced, and shared weights and their gradients are sent.
        """
        return gathers + self.reduced(reduced) + 2 * self.message(shared)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of layers or chunks; each field has one number per layer.

    For one microbatch: the seconds of the forward pass, of the backward pass, and of weight gradients; `held` bytes
    from the forward to the end of the backward pass; `brief` bytes while a layer is recomputed; `sent` bytes from a
    layer to the next chunk. For a step: `gathers`, the seconds in which weights are gathered; `static` bytes of
    weights, gradients and states; `reduced` bytes of gradients; `shared` bytes of weights that an earlier layer has
    too.
    """

    forward: Numbers
    backward: Numbers
    weight: Numbers
    gathers: Numbers
    static: Numbers
    held: Numbers
    brief: Numbers
    reduced: Numbers
    shared: Numbers
    sent: Numbers

    @cached_property
    def whole(self) -> Numbers:
        """Seconds of one microbatch, layer by layer."""
        return tuple(map(sum, zip(self.forward, self.backward, self.weight, strict=True)))

    def summed(self, name: str) -> Costs:
        """Return the total of a field over the layers before each layer, and over all layers."""
        numbers: Numbers = getattr(self, name)
        return np.concatenate([[0.0], np.cumsum(numbers)])

    @cached_property
    def brief_between(self) -> Costs:
        """The largest brief bytes of the layers from each layer to each later one, as a matrix."""
        count = len(self.brief)
        found = np.zeros((count + 1, count + 1))
        for begin in range(count):
            found[begin, begin + 1 :] = np.maximum.accumulate(self.brief[begin:])
        return found

    def chunks(self, starts: Iterable[int]) -> LayerCosts:
        """Return the costs of chunks; those after the first begin at the layers in `starts`."""
        ranges = [*pairwise([0, *starts, len(self.forward)])]

        def each(name: str, of: Callable[[Numbers], float] = sum) -> Numbers:
            numbers: Numbers = getattr(self, name)
            return tuple(of(numbers[a:b]) for a, b in ranges)

        sent = each("sent", lambda n: n[-1])
        held = tuple(own + came for own, came in zip(each("held"), (0.0, *sent), strict=False))
        added = {name: each(name) for name in ("forward", "backward", "weight", "static", *ONCE)}
        return LayerCosts(**added, held=held, brief=each("brief", max), sent=sent)

    def times(self, links: LinkTimes) -> Times:
        """Return the times with which a schedule of these chunks is simulated."""
        return Times(self.forward, self.backward, self.weight, tuple(float(links.message(n)) for n in self.sent))

    @property
    def memory(self) -> ChunkMemory:
        """Memory of the ranks without brief bytes; the gradients of weights need all that the forward pass has left."""
        return ChunkMemory(held=self.held, static=self.static)


def layer_costs(cuts: Shardings, prices: Prices, chain: Chain) -> LayerCosts:
    """Return the costs of a chain's layers under these cuts; a microbatch is a piece of the batch of `prices`."""
    return _Costs(cuts, MemoryModel(cuts.facts, prices, make_anew), prices, chain).costs()


class _Costs:
    def __init__(self, cuts: Shardings, kept: MemoryModel, prices: Prices, chain: Chain) -> None:
        self.cuts, self.kept, self.prices, self.chain = cuts, kept, prices, chain
        self.pieces = prices.saving.accumulate
        self.rows = {name: [0.0] * len(chain.layers) for name in LayerCosts.__dataclass_fields__}

    def costs(self) -> LayerCosts:
        self._add_operators()
        self._add_conversions()
        self._add_weights()
        self._add_made_again()
        self._add_sent()
        return LayerCosts(**{name: tuple(row) for name, row in self.rows.items()})

    def _layer_number(self, node: Node | None) -> int:
        """Return the index of a node's layer; nodes that belong to no layer count for the first."""
        return 0 if node is None else self.chain.of_node.get(node, 0)

    def _add_operators(self) -> None:
        kept, facts = self.kept, self.cuts.facts
        weights = facts.given & facts.trains
        for row in facts.rows:
            node, option = row.node, self.cuts.options[row.node]
            at, each = self._layer_number(node), option.seconds / self.pieces
            self.rows["held"][at] += kept.made_at(row, option, self.cuts.forms)
            if facts.trains.isdisjoint(node.outs):
                self.rows["forward"][at] += each
                continue
            forward = each / relative_passes(node, kept)
            weight = 0.0 if weights.isdisjoint(node.ins) else forward * BACKWARD / 2
            self._add_passes(at, forward, each - forward - weight, weight)

    def _add_passes(self, at: int, forward: float, backward: float, weight: float = 0.0) -> None:
        for name, seconds in (("forward", forward), ("backward", backward), ("weight", weight)):
            self.rows[name][at] += seconds

    def _add_conversions(self) -> None:
        """Add the conversions: those of weights once per step, and others for each microbatch.

        Half of the latter are in the backward pass, if a gradient comes back.
        """
        for m in self.cuts.meetings:
            at = self._first_layer(m.value) if m.node is None else self._layer_number(m.node)
            if m.value in self.cuts.facts.given:
                self.rows["gathers"][at] += m.seconds
                continue
            each = m.seconds / self.pieces
            part = 0.5 if m.value in self.cuts.facts.trains else 1.0
            self._add_passes(at, part * each, (1 - part) * each)

    def _add_weights(self) -> None:
        """Add the weights; the stage of each layer that uses a shared weight holds it and computes its gradient."""
        for v in (v for v in self.cuts.forms if v in self.cuts.facts.given):
            for n, at in enumerate(self._using_layers(v) or [0]):
                part = v.nbytes / self._ranks(v)
                self.rows["static"][at] += self.kept.held(v, self.cuts.forms[v])
                self.rows["reduced"][at] += part if v in self.cuts.facts.trains else 0.0
                self.rows["shared"][at] += part if n else 0.0

    def _add_made_again(self) -> None:
        layers = self.kept.of_layers(self.cuts.options, self.cuts.forms)
        number = {layer: n for n, layer in enumerate(self.chain.layers)}
        for layer, nbytes in layers.items():
            at = number.get(layer, 0)
            self.rows["brief"][at] = max(self.rows["brief"][at], nbytes)

    def _add_sent(self) -> None:
        """Add the bytes sent: a value that a later layer reads crosses each boundary on its path."""
        for v, made in self.chain.of_value.items():
            last = max(self._using_layers(v), default=made) if v in self.cuts.forms else made
            for at in range(made, last):
                self.rows["sent"][at] += self.kept.nbytes(v) / self._ranks(v)

    def _using_layers(self, v: Value) -> list[int]:
        found = (self.chain.of_node[n] for n in self.cuts.program.users.get(v, ()) if n in self.chain.of_node)
        return sorted({*found})

    def _first_layer(self, v: Value) -> int:
        """Return the layer that makes a value or, if none makes it, that reads it first."""
        return self.chain.of_value.get(v, next(iter(self._using_layers(v)), 0))

    def _ranks(self, v: Value) -> int:
        return self.prices.ranks if self.cuts.forms[v].kind == "cut" else 1
