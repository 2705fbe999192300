"""Repetition of the update of one parameter for all parameters of its kind.

An optimizer of torch treats parameters of one kind equally: those of one group with equal shapes, layouts and kinds of
states. So two parameters of each kind are recorded, and the nodes of one are copied for the others. Two are needed to
detect an optimizer that combines parameters: then a node reads values of both, and nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from meshwright.layout import Spec

from ..program.effects import is_cross_mesh, is_random_operator
from ..program.node import Node, Value, map_values
from ..program.program import Input, Program
from ..program.shape_inference import FreshNames, stem_of
from ..recording.recording import lifted_copy
from .optimizer_copy import StateKey
from .recorded_step import END, STEP, Recorded


def repeated(
    found: Recorded, templates: Mapping[str, str], trained: Sequence[Input], stepped: Sequence[str]
) -> Program | None:
    """Return the update of all parameters, or None if the optimizer combines parameters.

    `templates` gives for each parameter the recorded one of its kind; a recorded parameter is its own template.
    `trained` are the inputs of all parameters. The optimizer updates those in `stepped`, in this order.
    """
    owners = _owners(found.program)
    if owners is None:
        return None
    copies = _Copies(found.program, owners, templates)
    inputs = tuple(copies.inputs(trained, stepped))
    for part in range(END + 1):
        nodes = [node for node in found.program.nodes if found.part(node) == part]
        copies.add(nodes, stepped if part == STEP else [i.name for i in trained])
    return copies.finish(inputs, stepped)


def _owners(program: Program) -> dict[Value, str] | None:
    """Return the parameter that each value belongs to, without shared values; None if a value belongs to several."""
    owners = {i.value: name for i in program.inputs if (name := owner_of(i)) is not None}
    states = program.outputs["state"]
    if not _assign_forward(program, owners) or not all(isinstance(v, Value) for v in states.values()):
        return None
    for (name, _), value in states.items():
        if not _assign_back(program, owners, name, value):
            return None
    if not _assign_forward(program, owners):
        return None
    return None if _loses_exchange(program, owners) else owners


def _loses_exchange(program: Program, owners: Mapping[Value, str]) -> bool:
    """True if an exchange has no owner.

    It receives what a parameter of another stage sends, and would be lost without a reader.
    """
    exchanges = (node for node in program.nodes if is_cross_mesh(node.op))
    return any(owners.keys().isdisjoint((*node.ins, *node.outs)) for node in exchanges)


def owner_of(given: Input) -> str | None:
    """Return the parameter that an input of an update belongs to, or None."""
    if given.role in ("parameter", "gradient"):
        return given.name
    return given.source[0] if isinstance(given.source, tuple) else None


def _assign_forward(program: Program, owners: dict[Value, str]) -> bool:
    """Propagate owners to the results of nodes. False if a node has several owners, draws, or has no result."""
    for node in program.nodes:
        names = {owners[v] for v in (*node.ins, *node.outs) if v in owners}
        if len(names) > 1 or not node.outs or is_random_operator(node.op):
            return False
        owners.update((v, name) for v in node.outs for name in names)
    return True


def _assign_back(program: Program, owners: dict[Value, str], name: str, value: Value) -> bool:
    """Assign to `name` the values that its state depends on, such as `torch.tensor(0.0)`. False if others own one."""
    constants = {i.value for i in program.inputs if i.role == "constant"}
    left = [value]
    while left:
        v = left.pop()
        if v in owners:
            if owners[v] != name:
                return False
        elif v in program.producers:
            owners[v] = name
            left += [x for x in program.producers[v].ins if x.is_tensor]
        elif v in constants:
            owners[v] = name
        else:
            return False
    return True


@dataclass(slots=True)
class _Copies:
    """Builder of the whole program, with copies of the template's values for each parameter."""

    program: Program
    owners: Mapping[Value, str]
    templates: Mapping[str, str]
    nodes: list[Node] = field(default_factory=list[Node])
    _became: dict[str, dict[Value, Value]] = field(default_factory=dict[str, dict[Value, Value]])
    _shared: set[Node] = field(default_factory=set[Node])
    _names: FreshNames = field(init=False)

    def __post_init__(self) -> None:
        self._names = FreshNames(self.program.all_values())
        self._became = {name: {} for name in self.templates}

    def inputs(self, trained: Sequence[Input], stepped: Sequence[str]) -> Iterator[Input]:
        """Yield the inputs: parameters, gradients and states of all parameters, then shared inputs."""
        by_owner: dict[str, list[Input]] = {}
        for given in self.program.inputs:
            by_owner.setdefault(self.owners.get(given.value, ""), []).append(given)
        for role in ("parameter", "gradient"):
            for parameter in trained:
                (given,) = (i for i in by_owner[self.templates[parameter.name]] if i.role == role)
                yield self._copied_input(parameter.name, given)
        for name in stepped:
            states = [i for i in by_owner[self.templates[name]] if i.role not in ("parameter", "gradient")]
            yield from (self._copied_input(name, i) for i in states)
        yield from by_owner.get("", ())

    def _copied_input(self, name: str, given: Input) -> Input:
        if name == self.templates[name]:
            return given
        source: Any = given.source
        if isinstance(source, Tensor):
            new, source = given.name, lifted_copy(source)
        elif isinstance(source, tuple):
            new, source = f"{name}.{source[1]}", (name, source[1])
        else:
            new = name
        return replace(given, value=self._add_copy(name, given.value, new.replace(".", "_")), name=new, source=source)

    def _add_copy(self, name: str, v: Value, called: str) -> Value:
        copy = self._became[name][v] = replace(v, name=self._names.fresh(called))
        return copy

    def add(self, nodes: Sequence[Node], order: Sequence[str]) -> None:
        """Add the nodes of each parameter in turn."""
        by_owner: dict[str, list[Node]] = {}
        for node in nodes:
            by_owner.setdefault(self.owners.get(node.outs[0], ""), []).append(node)
        for name in order:
            for node in by_owner.get(self.templates[name], ()):
                self._add_shared(node)
                self.nodes.append(self._copied_node(name, node))

    def _add_shared(self, node: Node) -> None:
        """Add the shared nodes that this node reads, before their first reader."""
        makers = self.program.producers
        for maker in [makers[v] for v in node.ins if v in makers and v not in self.owners]:
            if maker not in self._shared:
                self._shared.add(maker)
                self._add_shared(maker)
                self.nodes.append(maker)

    def _copied_node(self, name: str, node: Node) -> Node:
        if name == self.templates[name]:
            return node
        for v in node.outs:
            self._add_copy(name, v, stem_of(node.op))
        copied = node.with_operands(lambda v: self._copy_of(name, v))
        return replace(copied, out=map_values(lambda v: self._copy_of(name, v), node.out))

    def _copy_of(self, name: str, v: Value) -> Value:
        """Return the parameter's copy of a value; a shared value is its own copy."""
        return self._became[name].get(v, v)

    def finish(self, inputs: tuple[Input, ...], stepped: Sequence[str]) -> Program:
        """Return the program with these inputs; the output states are in the order of the updates."""
        writes = self._writes()
        return replace(
            self.program,
            inputs=inputs,
            nodes=tuple(self.nodes),
            outputs={**self.program.outputs, "state": self._states(stepped)},
            writes=tuple((i.value, writes[i.value]) for i in inputs if i.value in writes),
            specs={**self.program.specs, **self._specs()},
        )

    def _writes(self) -> dict[Value, Value]:
        """Return the inputs of all parameters that are written, with their values afterwards."""
        followers: dict[str, list[str]] = {}
        for name, template in self.templates.items():
            followers.setdefault(template, []).append(name)
        pairs = ((name, x, v) for x, v in self.program.writes for name in followers[self.owners[x]])
        return {self._copy_of(name, x): self._copy_of(name, v) for name, x, v in pairs}

    def _states(self, stepped: Sequence[str]) -> dict[StateKey, Value]:
        """Return the states that the update creates, in the order of the updates."""
        created: dict[str, dict[str, Value]] = {}
        for (owner, key), v in self.program.outputs["state"].items():
            created.setdefault(owner, {})[key] = v
        return {
            (name, key): self._copy_of(name, v)
            for name in stepped
            for key, v in created.get(self.templates[name], {}).items()
        }

    def _specs(self) -> dict[Value, Spec]:
        """Return the specs of the copied values."""
        copies = self._became.values()
        return {became[v]: spec for v, spec in self.program.specs.items() for became in copies if v in became}
