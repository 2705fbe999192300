"""A recorded training step of one microbatch, split into the parts that run once and the parts of each action.

The nodes of a chunk's forward pass are its F. The nodes of its backward pass that an earlier chunk waits for are its B,
all others its W. Both are parts of one graph, so nothing is computed twice. Nodes that do not depend on a batch run
once before the microbatches: weights that are gathered, cast, or sent to another stage. Nodes that can work on the sum
of all microbatches' gradients run once after them: reductions, the gradients of tied weights, and the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from meshwright.graph import (
    ALWAYS,
    EVERYWHERE,
    Conversion,
    Draft,
    Edge,
    Input,
    Node,
    Program,
    Value,
    is_random_call,
    linear_tail,
    values_in,
)
from meshwright.layout import Spec
from meshwright.reshard import Exchange

from .._errors import StageError
from .repeated_concatenation import repeat_concatenations
from .stages import Stages

_ADD = torch.ops.aten.add.Tensor
PartKind = Literal["always", "F", "R", "B", "W", "end"]
_OF_CHUNKS: tuple[PartKind, ...] = ("F", "R", "B", "W")


class PartPlace(NamedTuple):
    """Place where a node runs.

    A place is an action of a chunk for a slice of the sequence, or once before or after all microbatches.
    """

    part: PartKind
    chunk: int = ALWAYS
    slice: int = 0


PROLOGUE = PartPlace("always")
EPILOGUE = PartPlace("end")


class Crossing(NamedTuple):
    """An exchange from one place to another; `tag` is unique among the crossings of a microbatch."""

    carry: Conversion
    operand: Value
    result: Value
    source: PartPlace
    target: PartPlace
    tag: int


@dataclass(frozen=True)
class RankParts:
    """The programs of one rank by place, and the values that pass between them.

    `inputs` are the inputs of the whole step. `gives` names the outputs of each program for the other programs; a
    program may call them differently. `sums` are the values whose sums over all microbatches the program behind reads.
    `terms` are the pairs (term, sum): the value itself, or the value of each slice of a sequence. `renewed` are pairs
    of a buffer and the value that it takes from each microbatch.
    """

    inputs: tuple[Input, ...]
    stages: Stages
    programs: Mapping[PartPlace, Program]
    gives: Mapping[PartPlace, tuple[Value, ...]]
    crossings: tuple[Crossing, ...]
    sums: tuple[Value, ...]
    terms: tuple[tuple[Value, Value], ...]
    renewed: tuple[tuple[Value, Value], ...]

    def after(self, act: Callable[[Program], Program]) -> RankParts:
        """Return the parts with each program replaced by `act(program)`."""
        return replace(self, programs={place: act(program) for place, program in self.programs.items()})


def split_step(
    step: Program, stages: Stages, recompute: bool = False, slices: int = 1, split: bool = True, stale: bool = False
) -> RankParts:
    """Split `step` into parts. Its outputs are those of `record_gradients`; the program behind gives the same outputs.

    Args:
        step: the recorded forward and backward pass of one microbatch.
        stages: the stage of each chunk.
        recompute: put the nodes of the backward pass that read forward values only into a part of their own, R.
        slices: number of slices of a sequence.
        split: split the backward pass into B and W. Otherwise it is one program, B, and nothing is held until a W.
        stale: weights change while microbatches are in flight. Nodes that compute gradients of weights from the values
        of
            weights then run for each microbatch.
    """
    return _StepSplitter(
        repeat_concatenations(step) if slices > 1 else step, stages, recompute, slices, split, stale
    ).parts()


@dataclass
class _StepSplitter:
    step: Program
    stages: Stages
    recompute: bool
    slices: int
    split: bool
    stale: bool
    at: dict[Node, PartPlace] = field(default_factory=dict[Node, PartPlace])
    of: dict[Value, PartPlace] = field(default_factory=dict[Value, PartPlace])
    crossings: list[Crossing] = field(default_factory=list[Crossing])
    _crossed: set[Value] = field(default_factory=set[Value])
    _terms: dict[Value, tuple[Value, ...]] = field(default_factory=dict[Value, tuple[Value, ...]])

    @cached_property
    def _own(self) -> list[int]:
        """The chunks of this rank."""
        own = self.stages.of(self.step.rank)
        return [c for c, stage in enumerate(self.stages.way) if stage == own]

    @property
    def _parts_of_chunks(self) -> tuple[PartKind, ...]:
        left_out = {*(() if self.recompute else ("R",)), *(() if self.split else ("W",))}
        return tuple(part for part in _OF_CHUNKS if part not in left_out)

    def parts(self) -> RankParts:
        self._place_inputs()
        for node in self.step.nodes:
            if node.origin.phase == "forward":
                self._settle(node, self._forward(node))
        late = [node for node in self.step.nodes if node.origin.phase != "forward"]
        for node in late:
            place = self._backward(node)
            if place is not None:
                self._settle(node, place)
        self._place_beside([node for node in late if node not in self.at and not self._is_crossing(node)])
        self._draw_along()
        self._put_behind()
        if self.stale:
            self._keep_versions()
        self._add_up()
        if self.split:
            self._split()
        if self.recompute:
            self._make_again()
        self._check_slices()
        return self._made()

    def _place_inputs(self) -> None:
        changed = {x for x, _ in self.step.writes}
        for given in self.step.inputs:
            if given.role not in ("batch", "size") and given.value not in changed:
                self.of[given.value] = PROLOGUE

    def _settle(self, node: Node, place: PartPlace) -> None:
        if self._is_crossing(node):
            self._cross(node)
            return
        self.at[node] = place
        for v in node.outs:
            self.of[v] = place
            if node.origin.edge is not None and any(x in self._crossed for x in node.ins):
                self._crossed.add(v)

    def _is_crossing(self, node: Node) -> bool:
        return isinstance(node.op, Conversion) and isinstance(node.op.step, Exchange) and node.origin.edge is not None

    def _cross(self, node: Node) -> None:
        """Add an exchange between chunks; in the backward pass it goes from the later chunk to the earlier one."""
        edge, back = node.origin.edge, node.origin.phase != "forward"
        assert edge is not None
        assert isinstance(node.op, Conversion)
        part: PartKind = "B" if back else "F"
        ends = PartPlace(part, edge.source, node.origin.slice), PartPlace(part, edge.target, node.origin.slice)
        source, target = reversed(ends) if back else ends
        (operand,), (result,) = node.ins, node.outs
        self.crossings.append(Crossing(node.op, operand, result, source, target, 2 * edge.number + back))
        self.of[result] = target
        self._crossed.add(result)

    def _forward(self, node: Node) -> PartPlace:
        origin = node.origin
        if origin.chunk == ALWAYS or self._is_always(node):
            return PROLOGUE
        if origin.chunk == EVERYWHERE:
            return PartPlace("F", min(self._own, default=0), origin.slice)
        return PartPlace("F", self._side(node, origin.edge, origin.chunk or 0, back=False), origin.slice)

    def _is_always(self, node: Node) -> bool:
        return not is_random_call(node) and all(self.of.get(v) == PROLOGUE for v in node.ins)

    def _side(self, node: Node, edge: Edge | None, chunk: int, back: bool) -> int:
        """Return the chunk of a node.

        A node that converts along an edge belongs to the chunk on its side of the exchange.
        """
        if edge is None:
            return chunk
        arrived = any(v in self._crossed for v in node.ins)
        return edge.target if arrived != back else edge.source

    def _backward(self, node: Node) -> PartPlace | None:
        """Return the place of the gradient of a forward node; None for nodes that belong to no forward node.

        A sum of the gradients from several chunks or slices runs where the last of them arrives.
        """
        origin = node.origin
        if origin.chunk is None or origin.chunk == EVERYWHERE:
            return None
        if origin.chunk == ALWAYS:
            return EPILOGUE
        chunk, at = self._side(node, origin.edge, origin.chunk, back=True), origin.slice
        late = [place for v in node.ins if (place := self.of.get(v, EPILOGUE)).part == "B"]
        return PartPlace("B", min([chunk, *(p.chunk for p in late)]), min([at, *(p.slice for p in late)]))

    def _place_beside(self, nodes: Sequence[Node]) -> None:
        """Place the nodes of the backward pass that belong to no forward node.

        Such a node runs with its readers in the backward pass, otherwise with the producers of its operands. So a
        backward pass starts in its chunk, and buffers are renewed where their new value is computed.
        """
        renewing = {v for _, v in self.step.writes}
        for node in reversed(nodes):
            if renewing.intersection(node.outs):
                renewing.update(node.ins)
            places = [self.at[u] for v in node.outs for u in self.step.users.get(v, ()) if u in self.at]
            if readers := [p for p in places if p.part == "B" and p.chunk != ALWAYS]:
                self._settle(node, _latest(readers))
        for node in nodes:
            if node not in self.at:
                near = [p for v in node.ins if v in self.of and (p := self.of[v]).chunk != ALWAYS]
                if not near and self._own and renewing.intersection(node.outs):
                    near = [PartPlace("F", self._own[0])]
                self._settle(node, _latest(near) if near else EPILOGUE)

    def _draw_along(self) -> None:
        """Move the draws of other ranks' chunks to the nearest own forward, in the order of the step.

        So all generators have the same state. With one chunk per rank, microbatches get the numbers of one device that
        takes them one after the other.
        """
        latest = self._latest_draws()
        for node, place in self.at.items():
            edge = node.origin.edge
            if place.part != "F" or place.chunk in self._own or not self._own:
                continue
            if node in latest:
                near = min(self._own, key=lambda c, at=latest[node]: (c < at, abs(c - at)))
                self._move(node, PartPlace("F", near, place.slice))
            elif edge is not None and edge.target in self._own and all(self._is_here(v) for v in node.ins):
                self._move(node, place._replace(chunk=edge.target))  # draws that are repeated here are not sent

    def _latest_draws(self) -> Mapping[Node, int]:
        """Map each draw without operands of the batch to the last chunk where it precedes all later draws."""
        found: dict[Node, int] = {}
        least = len(self.stages.way)
        for node in reversed(self.step.nodes):
            if node in self.at and self.at[node].part == "F" and is_random_call(node):
                least = min(least, self.at[node].chunk)
                if all(self.of.get(v) == PROLOGUE for v in node.ins):
                    found[node] = least
        return found

    def _is_here(self, v: Value) -> bool:
        return v in self.of and self.of[v].chunk in (ALWAYS, *self._own)

    def _keep_versions(self) -> None:
        """Move nodes that compute gradients from weights into each microbatch.

        They then read the microbatch's version of the weights.
        """
        for node in self.step.nodes:
            is_late = self.at.get(node) == EPILOGUE and node.origin.chunk == ALWAYS
            if is_late and any(self.of.get(v) == PROLOGUE and v.is_tensor for v in node.ins):
                self._bring(node)

    def _bring(self, node: Node) -> None:
        """Move a node, with its producers after all microbatches, to the place of the gradient that it reads."""
        if isinstance(node.op, Conversion) and isinstance(node.op.step, Exchange):
            raise StageError(
                "a schedule with several updates per step",
                f"{node.op!r}, which brings gradients to other ranks",
                "the gradients would arrive at newer weights than their own",
                "give shared weights one layout on all stages that use them, or use a schedule such as 1F1B",
            )
        ins = [v for v in node.ins if self.of.get(v, PROLOGUE) != PROLOGUE]
        for made in (self.step.producers[v] for v in ins if self.of[v] == EPILOGUE):
            self._bring(made)
        places = [self.of[v] for v in ins]
        if EPILOGUE not in places and places:
            self._move(node, _latest(places))

    def _put_behind(self) -> None:
        """Move linear tails of results into the part after all microbatches, and with them all nodes that read them."""
        for v in values_in(self.step.outputs):
            for node in linear_tail(self.step, v):
                if not self._reaches_only_behind(node):
                    break
                self._move(node, EPILOGUE)
        for node in self.step.nodes:
            if node in self.at and node.origin.phase != "forward" and any(self.of.get(v) == EPILOGUE for v in node.ins):
                self._move(node, EPILOGUE)

    def _add_up(self) -> None:
        """Turn sums over slices, or over uses of a tied weight, into terms of the sum over all microbatches.

        So no W waits for another one. Sums of placeholders for the gradients of other ranks' parameters run in the part
        after all microbatches.
        """
        left = [v for node, place in self.at.items() if place == EPILOGUE for v in node.ins]
        left += values_in(self.step.outputs)
        while left:
            v = left.pop()
            if not self._is_added(v) or any(self.at.get(u) != EPILOGUE for u in self.step.users.get(v, ())):
                continue
            node = self.step.producers[v]
            if self.at[node].chunk in self._own:
                self._terms[v] = tuple(self._flat(v))
            else:
                self._move(node, EPILOGUE)
                left += node.ins

    def _flat(self, v: Value) -> Iterator[Value]:
        node = self.step.producers[v]
        del self.at[node]
        for x in node.ins:
            if self._is_added(x) and len(self.step.users[x]) == 1 and x not in self.step.results:
                yield from self._flat(x)
            else:
                yield x

    def _is_added(self, v: Value) -> bool:
        node = self.step.producers.get(v)
        if node is None or node.op != _ADD or len(node.ins) != 2 or node.kwargs:
            return False
        return node in self.at and self.at[node].part == "B"

    def _reaches_only_behind(self, node: Node) -> bool:
        users = (u for v in node.outs for u in self.step.users.get(v, ()))
        return node in self.at and all(self.at.get(u) == EPILOGUE for u in users)

    def _move(self, node: Node, place: PartPlace) -> None:
        self.at[node] = place
        self.of.update(dict.fromkeys(node.outs, place))

    def _split(self) -> None:
        """Move the nodes of the backward pass that no other chunk and no exchange needs from B to W."""
        needed = {c.operand for c in self.crossings}
        for node in self.step.nodes:
            if node in self.at:
                needed.update(v for v in node.ins if self.at[node] != self.of.get(v) and self.at[node].part == "B")
        for node in reversed(self.step.nodes):
            place = self.at.get(node)
            if place is None or place.part != "B":
                continue
            if any(v in needed for v in node.outs):
                needed.update(node.ins)
            else:
                self._move(node, place._replace(part="W"))
                needed.update(v for v in node.ins if self.of.get(v, place).slice != place.slice)

    def _make_again(self) -> None:
        """Move the nodes of the backward pass that read forward values only to R."""
        for node in self.step.nodes:
            place = self.at.get(node, EPILOGUE)
            if place.part in ("B", "W") and node.ins and all(self._is_forward(v) for v in node.ins):
                self._move(node, place._replace(part="R"))

    def _check_slices(self) -> None:
        """Check that no slice reads a later one in the forward pass, or an earlier one in the backward pass."""
        for node, place in self.at.items():
            if any(_is_late(place, self.of[v]) for v in node.ins if v in self.of):
                raise StageError(
                    "a table of slices of a sequence",
                    f"{node.op!r} {node.origin.layer}".rstrip(),
                    "an earlier slice needs its gradient before it exists",
                    "use a schedule of whole sequences",
                )

    def _is_forward(self, v: Value) -> bool:
        return v not in self.of or self.of[v].part in ("always", "F", "R")

    def _made(self) -> RankParts:
        chunks = self._own
        order = product(self._parts_of_chunks, chunks, range(self.slices))
        places = [PROLOGUE, *(PartPlace(part, c, n) for part, c, n in order), EPILOGUE]
        nodes: dict[PartPlace, list[Node]] = {place: [] for place in places}
        for node in self.step.nodes:
            if node in self.at and self.at[node] not in nodes and not node.ins:
                self._move(node, EPILOGUE)  # a placeholder for the gradient of another rank's parameter
            if self.at.get(node) in nodes:
                nodes[self.at[node]].append(node)
        crossings = tuple(c for c in self.crossings if c.source in nodes or c.target in nodes)
        sums = self._sums(nodes[EPILOGUE])
        terms = tuple((x, v) for v in sums for x in self._terms.get(v, (v,)))
        wanted = self._wanted(nodes, crossings) | {x for x, _ in terms}
        programs = {place: self._program(nodes[place], _made_of(nodes[place], wanted)) for place in places[:-1]}
        programs[EPILOGUE] = self._program(nodes[EPILOGUE], self.step.outputs)
        renewed = tuple((x, v) for x, v in self.step.writes if self.of.get(v, PROLOGUE).chunk in (ALWAYS, *chunks))
        gives = {place: tuple(values_in(program.outputs)) for place, program in programs.items()}
        return RankParts(self.step.inputs, self.stages, programs, gives, crossings, sums, terms, renewed)

    def _sums(self, behind: Sequence[Node]) -> tuple[Value, ...]:
        """Return the values of each microbatch that are read after all microbatches, or are results."""
        read = [v for node in behind for v in node.ins] + list(values_in(self.step.outputs))
        return tuple(v for v in dict.fromkeys(read) if v in self.of and self.of[v].part in ("F", "B", "W"))

    def _wanted(self, nodes: Mapping[PartPlace, Sequence[Node]], crossings: Sequence[Crossing]) -> set[Value]:
        """Return the values that are read outside the place where they are computed."""
        read = {v for place, members in nodes.items() for n in members for v in n.ins if self.of.get(v) != place}
        return read | {c.operand for c in crossings} | {v for _, v in self.step.writes}

    def _program(self, nodes: Sequence[Node], outputs: Any) -> Program:
        made = {v for node in nodes for v in node.outs}
        inputs = read_by(nodes, values_in(outputs), self.step.inputs, self.step.specs)
        read = {i.value for i in inputs}
        specs = {v: s for v, s in self.step.specs.items() if v in made or v in read}
        return Draft(Program(inputs, tuple(nodes), outputs, rank=self.step.rank, specs=specs)).finish()


def read_by(
    nodes: Sequence[Node], results: Iterable[Value], known: Iterable[Input], specs: Mapping[Value, Spec]
) -> tuple[Input, ...]:
    """Return the inputs of a program of these nodes and results: `known` inputs, and outputs of other programs."""
    made = {v for node in nodes for v in node.outs}
    given = {i.value: i for i in known}
    read = dict.fromkeys(v for v in [*(v for node in nodes for v in node.ins), *results] if v not in made)
    return tuple(given.get(v) or Input(v, "saved", v.name, specs.get(v), v) for v in read)


def _latest(places: Iterable[PartPlace]) -> PartPlace:
    return max(places, key=lambda p: (p.part == "B", p.chunk, p.slice))


def _is_late(place: PartPlace, near: PartPlace) -> bool:
    """True if an action of one slice would read a value that another slice may compute later."""
    if place.slice == near.slice or near.part == "always" or place.part in ("always", "end"):
        return False
    if near.part == "F":
        return place.part == "F" and near.slice > place.slice
    return near.part != "B" or near.slice < place.slice


def _made_of(nodes: Sequence[Node], wanted: Collection[Value]) -> tuple[Value, ...]:
    return tuple(v for node in nodes for v in node.outs if v in wanted)
