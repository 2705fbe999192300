"""Detection of a chain of repeated layers in a captured model, which pipeline stages can divide.

Every operator that depends on the batch belongs to a layer. Operators outside the layers belong to the layer that their
operands come from. In a chain, values that get a gradient go from a layer to the next one and no further. Operators
outside the layers read one layer each, and the loss is computed after the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.graph import Node, Program, Value

from ..sharding.memory_saving import block_of, blocks_of


@dataclass(frozen=True)
class Chain:
    """The repeated layers in order, and the index of the layer of each operator and value.

    `why_not` is the reason if a model is no chain. Operators outside the layers that depend on no batch, or on a batch
    alone, belong to no layer: every stage has them.
    """

    layers: tuple[str, ...]
    of_node: Mapping[Node, int] = field(default_factory=dict[Node, int], repr=False)
    of_value: Mapping[Value, int] = field(default_factory=dict[Value, int], repr=False)
    why_not: str = ""


def chain_of(program: Program, trains: Set[Value]) -> Chain:
    """Return the chain of a captured forward pass with its loss; the values in `trains` get a gradient."""
    layers = blocks_of(program)
    lists = dict.fromkeys(layer.rpartition(".")[0] for layer in layers)
    if len(layers) < 2:
        return Chain(layers, why_not="the model has no numbered layers, such as those of a ModuleList")
    if len(lists) > 1:
        return Chain(
            layers, why_not=f"the layers are in several lists: {' and '.join(path or 'the model' for path in lists)}"
        )
    return _Followed(program, layers, trains).chain()


@dataclass
class _Followed:
    program: Program
    layers: Sequence[str]
    trains: Set[Value]
    of_node: dict[Node, int] = field(default_factory=dict[Node, int])
    of_value: dict[Value, int] = field(default_factory=dict[Value, int])

    def chain(self) -> Chain:
        seen = 0
        for node in self.program.nodes:
            if self._batch_values.isdisjoint(node.outs):
                own = self._own_layer(node)
                self.of_node |= {} if own is None else {node: own}
                continue
            if why_not := self._why_broken(node):
                return Chain(tuple(self.layers), why_not=why_not)
            at = self._layer_of(node, seen)
            if at is not None:
                seen = max(seen, at)
                self.of_node[node] = at
                self.of_value |= dict.fromkeys(node.outs, at)
        why_not = next(self._why_no_chain(), "")
        return Chain(tuple(self.layers), self.of_node, self.of_value, why_not)

    def _layer_of(self, node: Node, seen: int) -> int | None:
        """Return the layer of a node: its own, the last of its operands, or `seen` if it reads only weights."""
        own = self._own_layer(node)
        if own is None:
            own = max((self.of_value[v] for v in node.ins if v in self.of_value), default=None)
        return seen if own is None and not self.trains.isdisjoint(node.ins) else own

    def _why_broken(self, node: Node) -> str:
        """Return the reason why this node breaks the chain, or an empty text."""
        own, where = self._own_layer(node), node.origin.layer or "the model"
        read = {self.of_value[v]: v for v in node.ins if v in self.of_value}
        if own is None:
            return f"{where} reads results of several layers" if len(read) > 1 else ""
        if any(at > own for at in read):
            return f"{where} reads a result of the later layer {self.layers[max(read)]}"
        if any(at < own - 1 and v in self.trains for at, v in read.items()):
            return f"{where} reads a result of the earlier layer {self.layers[min(read)]}"
        return ""

    def _why_no_chain(self) -> Iterator[str]:
        last = len(self.layers) - 1
        names = {given.value: given.name for given in self.program.inputs}
        written = {v: names[x] for x, v in self.program.writes}
        for v in self.program.results:
            if (at := self.of_value.get(v)) != last:
                what = f"the new value of {written[v]}" if v in written else "an output of the model"
                where = "outside the layers" if at is None else f"in {self.layers[at]}"
                yield f"{what} is computed {where}, before the last layer {self.layers[last]}"
        owners = [at for v in self._parameters if (at := self._first_use(v)) is not None]
        if owners != sorted(owners):
            yield "the modules are registered in another order than they run"

    @cached_property
    def _parameters(self) -> list[Value]:
        return [i.value for i in self.program.inputs if i.role == "parameter"]

    def _first_use(self, v: Value) -> int | None:
        return next((self.of_node[n] for n in self.program.users.get(v, ()) if n in self.of_node), None)

    def _own_layer(self, node: Node) -> int | None:
        return self._layer_numbers.get(block_of(node.origin.layer))

    @cached_property
    def _layer_numbers(self) -> dict[str, int]:
        return {layer: n for n, layer in enumerate(self.layers)}

    @cached_property
    def _batch_values(self) -> set[Value]:
        """Values that depend on the batch."""
        found = {i.value for i in self.program.inputs if i.role == "batch"}
        for node in self.program.nodes:
            if not found.isdisjoint(node.ins):
                found.update(node.outs)
        return found
