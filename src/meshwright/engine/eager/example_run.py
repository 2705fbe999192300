"""The forward pass of an example, captured and not run: costs of modules, their order, and places of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.graph import CaptureError, Node, Program, Value, capture, work_of

_WITHOUT_EXAMPLE = "or leave out example=: then modules are in the order of registration"


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """The program of a model's forward pass of an example."""

    program: Program

    @classmethod
    def of(cls, model: nn.Module, example: Sequence[Any]) -> ExampleRun:
        """Return the run. Python code may read numbers that depend on the example alone, such as lengths of masks.

        Raises CaptureError for code that reads other numbers.
        """
        try:
            return cls(capture(model, model, example, is_run=False).program)
        except CaptureError:
            return cls._with_numbers(model, example)

    @classmethod
    def _with_numbers(cls, model: nn.Module, example: Sequence[Any]) -> ExampleRun:
        """Return the run with the example's tensors as constants, whose numbers a capture knows."""
        try:
            return cls(capture(model, lambda: model(*example), (), is_run=False).program)
        except CaptureError as error:
            raise CaptureError(error.asked, error.found, error.why, f"{error.write}; {_WITHOUT_EXAMPLE}") from error

    def costs(self) -> dict[str, float]:
        """Return the operations of each module without its children, by path."""
        costs: dict[str, float] = {}
        for node in self.program.nodes:
            costs[node.origin.layer] = costs.get(node.origin.layer, 0.0) + work_of(node).flops
        return costs

    def ordered(self, layers: Sequence[str]) -> list[str]:
        """Return the layers in the order of their first operators; one without operators stays behind its neighbour."""
        first: dict[str, int] = {}
        for number, node in enumerate(self.program.nodes):
            layer = _layer_of(node, layers)
            if layer is not None:
                first.setdefault(layer, number)
        places: dict[str, int] = {}
        at = -1
        for name in layers:
            at = places[name] = first.get(name, at)
        return sorted(layers, key=lambda name: places[name])

    def places(self, layers: Sequence[str]) -> dict[str, str]:
        """Return a layer for each parameter and buffer: for one that is written to, the last that the new value needs.

        For others it is the first layer that reads the tensor, or a value of such tensors alone. `layers` are in the
        order of their calls.
        """
        at = self._latest_layers(layers)
        first: dict[Value, int] = {}
        for node in reversed(self.program.nodes):
            users = [at[v] if at[v] >= 0 else first.get(v, len(layers)) for v in node.outs]
            for v in node.ins:
                first[v] = min([first.get(v, len(layers)), *users])
        found = {x: first.get(x, 0) for x in (given.value for given in self.program.inputs)}
        found |= {x: at.get(v, 0) for x, v in self.program.writes}
        return {i.name: layers[min(max(found[i.value], 0), len(layers) - 1)] for i in self.program.inputs}

    def _latest_layers(self, layers: Sequence[str]) -> dict[Value, int]:
        """Return the number of the latest layer that each value depends on; -1 if it depends on none."""
        at: dict[Value, int] = {}
        for node in self.program.nodes:
            layer = _layer_of(node, layers)
            own = -1 if layer is None else layers.index(layer)
            at.update(dict.fromkeys(node.outs, max([own, *(at.get(v, -1) for v in node.ins)])))
        return at


def _layer_of(node: Node, layers: Sequence[str]) -> str | None:
    """Return the layer in whose call a node was recorded."""
    path = node.origin.layer
    return next((name for name in layers if path == name or path.startswith(f"{name}.")), None)


Costs = Mapping[str, float]
"""Module path → its cost: operations of a forward pass, or parameters."""


def costs_of(model: nn.Module) -> dict[str, float]:
    """Return each module's number of parameters without its children."""
    costs: dict[str, float] = {}
    for name, p in model.named_parameters():
        owner = name.rpartition(".")[0]
        costs[owner] = costs.get(owner, 0.0) + p.numel()
    return costs
