"""A recorded training step of one microbatch, split into the parts that run once and the parts of each action.

The nodes of a chunk's forward pass are its F. The nodes of its backward pass that an earlier chunk waits for are its B,
all others its W. Both are parts of one graph, so nothing is computed twice. Nodes that do not depend on a batch run
once before the microbatches: weights that are gathered, cast, or sent to another stage. Nodes that can work on the sum
of all microbatches' gradients run once after them: reductions, the gradients of tied weights, and the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Literal, NamedTuple

import torch

from meshwright.graph import (
    ALWAYS,
    EVERYWHERE,
    Conversion,
    Draft,
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
from .stages import Stages

_ADD = torch.ops.aten.add.Tensor
PartKind = Literal["always", "F", "R", "B", "W", "end"]
_OF_CHUNKS: tuple[PartKind, ...] = ("F", "R", "B", "W")


class PartPlace(NamedTuple):
    """Place where a node runs.

    A place is an action of a chunk, or once before or after all microbatches.
    """

    part: PartKind
    chunk: int = ALWAYS


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
    program may call them differently. `terms` are the pairs (term, sum): the value itself, or each term of a dissolved
    sum. `renewed` are pairs of a buffer and the value that it takes from each microbatch.
    """

    inputs: tuple[Input, ...]
    stages: Stages
    programs: Mapping[PartPlace, Program]
    gives: Mapping[PartPlace, tuple[Value, ...]]
    crossings: tuple[Crossing, ...]
    terms: tuple[tuple[Value, Value], ...]
    renewed: tuple[tuple[Value, Value], ...]

    @property
    def sums(self) -> tuple[Value, ...]:
        """The values whose sums over all microbatches the program behind reads."""
        return tuple(dict.fromkeys(total for _, total in self.terms))

    def after(self, act: Callable[[Program], Program]) -> RankParts:
        """Return the parts with each program replaced by `act(program)`."""
        return replace(self, programs={place: act(program) for place, program in self.programs.items()})


@dataclass(frozen=True)
class _RankStep:
    """The recorded step of one microbatch on its rank, and what follows from the origins of its nodes."""

    program: Program
    stages: Stages

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The chunks of this rank."""
        stage = self.stages.of(self.program.rank)
        return tuple(chunk for chunk, at in enumerate(self.stages.way) if at == stage)

    @cached_property
    def crossings(self) -> Mapping[Node, Crossing]:
        """The exchanges between chunks. These nodes have no place of their own: two places take part in them."""
        found = {node: _crossing_of(node) for node in self.program.nodes}
        return {node: crossing for node, crossing in found.items() if crossing is not None}

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes other than exchanges between chunks, in order."""
        return tuple(node for node in self.program.nodes if node not in self.crossings)

    @cached_property
    def outputs(self) -> frozenset[Value]:
        """The values in the outputs of the step."""
        return frozenset(values_in(self.program.outputs))

    @cached_property
    def arrived(self) -> frozenset[Value]:
        """The values that conversions along an edge compute from the exchange on."""
        found: set[Value] = set()
        for node in self.program.nodes:
            is_behind = node.origin.edge is not None and not found.isdisjoint(node.ins)
            if node in self.crossings or is_behind:
                found.update(node.outs)
        return frozenset(found)

    def chunk_of(self, node: Node) -> int:
        """Return the chunk of a node.

        A node that converts along an edge belongs to the chunk on its side of the exchange.
        """
        edge = node.origin.edge
        if edge is None:
            return node.origin.chunk or 0
        has_arrived = not self.arrived.isdisjoint(node.ins)
        return edge.target if has_arrived == (node.origin.phase == "forward") else edge.source

    def readers_of(self, node: Node) -> Sequence[Node]:
        """Return the nodes that read a result of a node."""
        return [reader for v in node.outs for reader in self.program.users.get(v, ())]


Places = Mapping[Node | Value, PartPlace]
"""The place of each node, and the place where each value is available first.

Exchanges between chunks have no place, nor do sums that were dissolved into their terms; their results have one.
"""


def split_step(
    step: Program, stages: Stages, recompute: bool = False, split: bool = True, stale: bool = False
) -> RankParts:
    """Split `step` into parts. Its outputs are those of `record_gradients`; the program behind gives the same outputs.

    Args:
        step: the recorded forward and backward pass of one microbatch.
        stages: the stage of each chunk.
        recompute: put the nodes of the backward pass that read forward values only into a part of their own, R.
        split: split the backward pass into B and W. Otherwise it is one program, B, and nothing is held until a W.
        stale: weights change while microbatches are in flight. Nodes that compute gradients of weights from the values
            of weights then run for each microbatch.
    """
    whole = _RankStep(step, stages)
    places = _place_forward(whole, _place_given_values(whole))
    places = _place_backward(whole, places)
    places = _place_with_readers(whole, places)
    places = _place_with_operands(whole, places)
    places = _align_draws(whole, places)
    places = _postpone_linear_tails(whole, places)
    places = _postpone_readers(whole, places)
    if stale:
        places = _repeat_weight_gradients(whole, places)
    places = _dissolve_sums(whole, places)
    if split:
        places = _split_backward(whole, places)
    if recompute:
        places = _split_recomputation(whole, places)
    left_out = {*(() if recompute else ("R",)), *(() if split else ("W",))}
    kinds: list[PartKind] = [part for part in _OF_CHUNKS if part not in left_out]
    return _rank_parts(whole, places, [PartPlace(*each) for each in product(kinds, whole.own)])


def _crossing_of(node: Node) -> Crossing | None:
    """Return the exchange between chunks that a node is; None for other nodes.

    In the backward pass it goes from the later chunk to the earlier one.
    """
    edge = node.origin.edge
    if edge is None or not isinstance(node.op, Conversion) or not isinstance(node.op.step, Exchange):
        return None
    (operand,), (result,) = node.ins, node.outs
    if node.origin.phase == "forward":
        source, target = (PartPlace("F", chunk) for chunk in (edge.source, edge.target))
        return Crossing(node.op, operand, result, source, target, 2 * edge.number)
    source, target = (PartPlace("B", chunk) for chunk in (edge.target, edge.source))
    return Crossing(node.op, operand, result, source, target, 2 * edge.number + 1)


def _runs_at(node: Node, place: PartPlace) -> Places:
    """Return the places of a node and its results, if the node runs at `place`."""
    return dict.fromkeys((node, *node.outs), place)


def _place_given_values(step: _RankStep) -> Places:
    """Return the places of inputs that stay the same for all microbatches, and of values that exchanges bring."""
    places: dict[Node | Value, PartPlace] = {c.result: c.target for c in step.crossings.values()}
    changed = {x for x, _ in step.program.writes}
    for given in step.program.inputs:
        if given.role not in ("batch", "size") and given.value not in changed:
            places[given.value] = PROLOGUE
    return places


def _place_forward(step: _RankStep, places: Places) -> Places:
    """Add the places of the nodes of the forward pass: in the chunk of each, or once before the microbatches."""
    placed = dict(places)
    for node in step.nodes:
        if node.origin.phase == "forward":
            placed |= _runs_at(node, _forward_place(step, placed, node))
    return placed


def _forward_place(step: _RankStep, places: Places, node: Node) -> PartPlace:
    if node.origin.chunk == ALWAYS or (_reads_prologue_only(node, places) and not is_random_call(node)):
        return PROLOGUE
    is_everywhere = node.origin.chunk == EVERYWHERE
    chunk = min(step.own, default=0) if is_everywhere else step.chunk_of(node)
    return PartPlace("F", chunk)


def _reads_prologue_only(node: Node, places: Places) -> bool:
    return all(places.get(v) == PROLOGUE for v in node.ins)


def _place_backward(step: _RankStep, places: Places) -> Places:
    """Add the places of the gradients of forward nodes. Gradients of nodes in no chunk run after all microbatches.

    A sum of the gradients from several chunks runs where the last of them arrives.
    """
    placed = dict(places)
    for node in step.nodes:
        if node in placed or node.origin.chunk in (None, EVERYWHERE):
            continue
        if node.origin.chunk == ALWAYS:
            placed |= _runs_at(node, EPILOGUE)
            continue
        arriving = [placed[v] for v in node.ins if v in placed and placed[v].part == "B"]
        chunk = min([step.chunk_of(node), *(place.chunk for place in arriving)])
        placed |= _runs_at(node, PartPlace("B", chunk))
    return placed


def _place_with_readers(step: _RankStep, places: Places) -> Places:
    """Add the places of nodes that belong to no forward node and have readers in the backward pass: with the readers.

    So a backward pass starts in its chunk.
    """
    placed = dict(places)
    for node in reversed(step.nodes):
        if node not in placed:
            readers = [placed[reader] for reader in step.readers_of(node) if reader in placed]
            readers = [place for place in readers if place.part == "B"]
            if readers:
                placed |= _runs_at(node, _latest(readers))
    return placed


def _place_with_operands(step: _RankStep, places: Places) -> Places:
    """Add the places of all other nodes: with the producers of their operands, or after all microbatches.

    So buffers are renewed where their new value is computed.
    """
    placed = dict(places)
    renewing = _renewing_values(step, places)
    for node in step.nodes:
        if node in placed:
            continue
        producers = [placed[v] for v in node.ins if v in placed and placed[v].chunk != ALWAYS]
        if producers:
            placed |= _runs_at(node, _latest(producers))
        elif step.own and not renewing.isdisjoint(node.outs):
            placed |= _runs_at(node, PartPlace("F", step.own[0]))
        else:
            placed |= _runs_at(node, EPILOGUE)
    return placed


def _renewing_values(step: _RankStep, places: Places) -> set[Value]:
    """Return the new values of buffers, and the values that nodes without a place compute them from."""
    found = {v for _, v in step.program.writes}
    for node in reversed(step.nodes):
        if node not in places and not found.isdisjoint(node.outs):
            found.update(node.ins)
    return found


def _align_draws(step: _RankStep, places: Places) -> Places:
    """Move the draws of other ranks' chunks to the nearest own forward, in the order of the step.

    So all generators have the same state. With one chunk per rank, microbatches get the numbers of one device that
    takes them one after the other.
    """
    if not step.own:
        return places
    moved = dict(places)
    latest = _latest_draws(step, places)
    for node in step.nodes:
        place, edge = moved[node], node.origin.edge
        if place.part != "F" or place.chunk in step.own:
            continue
        if node in latest:
            moved |= _runs_at(node, place._replace(chunk=_nearest_chunk(step.own, latest[node])))
        elif edge is not None and edge.target in step.own and all(_is_here(v, step, moved) for v in node.ins):
            moved |= _runs_at(node, place._replace(chunk=edge.target))  # draws that are repeated here are not sent
    return moved


def _latest_draws(step: _RankStep, places: Places) -> Mapping[Node, int]:
    """Map each draw without operands of the batch to the last chunk where it precedes all later draws."""
    found: dict[Node, int] = {}
    least = len(step.stages.way)
    for node in reversed(step.nodes):
        if places[node].part == "F" and is_random_call(node):
            least = min(least, places[node].chunk)
            if _reads_prologue_only(node, places):
                found[node] = least
    return found


def _nearest_chunk(chunks: Sequence[int], to: int) -> int:
    """Return the first chunk from `to` on; if there is none, the last one before it."""
    return min(chunks, key=lambda chunk: (chunk < to, abs(chunk - to)))


def _is_here(v: Value, step: _RankStep, places: Places) -> bool:
    return v in places and places[v].chunk in (ALWAYS, *step.own)


def _postpone_linear_tails(step: _RankStep, places: Places) -> Places:
    """Move linear tails of results into the part after all microbatches."""
    moved = dict(places)
    for v in values_in(step.program.outputs):
        for node in linear_tail(step.program, v):
            if node not in moved or not _is_read_at_end_only(node, step, moved):
                break
            moved |= _runs_at(node, EPILOGUE)
    return moved


def _is_read_at_end_only(node: Node, step: _RankStep, places: Places) -> bool:
    """True if the results of a node are read, and only after all microbatches."""
    readers = step.readers_of(node)
    is_read = bool(readers) or not step.outputs.isdisjoint(node.outs)
    return is_read and all(places.get(reader) == EPILOGUE for reader in readers)


def _postpone_readers(step: _RankStep, places: Places) -> Places:
    """Move all nodes that read a value of the part after all microbatches into that part."""
    moved = dict(places)
    for node in step.nodes:
        if node.origin.phase != "forward" and any(moved.get(v) == EPILOGUE for v in node.ins):
            moved |= _runs_at(node, EPILOGUE)
    return moved


def _repeat_weight_gradients(step: _RankStep, places: Places) -> Places:
    """Move nodes that compute gradients from weights, and their producers after all microbatches, into each microbatch.

    They then read the microbatch's version of the weights. Each runs at the place of the gradient that it reads.
    """
    moved = dict(places)
    repeated = _weight_gradients(step, places)
    for node in step.nodes:
        if node in repeated:
            _check_repeatable(node)
            gradients = [moved[v] for v in node.ins if v in moved and moved[v] != PROLOGUE]
            if gradients and EPILOGUE not in gradients:
                moved |= _runs_at(node, _latest(gradients))
    return moved


def _weight_gradients(step: _RankStep, places: Places) -> Collection[Node]:
    """Return the nodes after all microbatches that compute gradients from weights, and their producers there."""
    found: set[Node] = set()
    for node in reversed(step.nodes):
        is_late = places[node] == EPILOGUE and node.origin.chunk == ALWAYS
        if is_late and any(places.get(v) == PROLOGUE and v.is_tensor for v in node.ins):
            found.add(node)
        if node in found:
            found.update(step.program.producers[v] for v in node.ins if places.get(v) == EPILOGUE)
    return found


def _check_repeatable(node: Node) -> None:
    if isinstance(node.op, Conversion) and isinstance(node.op.step, Exchange):
        raise StageError(
            "a schedule with several updates per step",
            f"{node.op!r}, which brings gradients to other ranks",
            "the gradients would arrive at newer weights than their own",
            "give shared weights one layout on all stages that use them, or use a schedule such as 1F1B",
        )


def _dissolve_sums(step: _RankStep, places: Places) -> Places:
    """Turn sums over the uses of a tied weight into terms of the sum over all microbatches.

    So no W waits for another one. Sums of placeholders for the gradients of other ranks' parameters run in the part
    after all microbatches.
    """
    kept = dict(places)
    dissolved: set[Node] = set()
    for node in reversed(step.nodes):
        if kept[node].part != "B" or node.op != _ADD or len(node.ins) != 2 or node.kwargs:
            continue
        if not _is_read_at_end_only(node, step, kept):
            if _is_inner_sum(node, step, dissolved):
                dissolved.add(node)
        elif kept[node].chunk in step.own:
            dissolved.add(node)
        else:
            kept |= _runs_at(node, EPILOGUE)
    return {each: place for each, place in kept.items() if each not in dissolved}


def _is_inner_sum(node: Node, step: _RankStep, dissolved: Collection[Node]) -> bool:
    """True if only a dissolved sum reads the result of a sum."""
    readers = step.readers_of(node)
    return len(readers) == 1 and readers[0] in dissolved and node.outs[0] not in step.program.results


def _terms_of(v: Value, step: _RankStep, places: Places) -> Iterator[Value]:
    """Yield the terms of a dissolved sum; any other value is its own term."""
    node = step.program.producers.get(v)
    if node is None or node in places or node in step.crossings:
        yield v
        return
    for x in node.ins:
        yield from _terms_of(x, step, places)


def _split_backward(step: _RankStep, places: Places) -> Places:
    """Move the nodes of the backward pass that no other chunk and no exchange needs from B to W."""
    moved = dict(places)
    backward = [node for node in step.nodes if node in places and places[node].part == "B"]
    needed = {c.operand for c in step.crossings.values()} | _read_from_elsewhere(backward, places)
    for node in reversed(backward):
        if not needed.isdisjoint(node.outs):
            needed.update(node.ins)
        else:
            moved |= _runs_at(node, places[node]._replace(part="W"))
    return moved


def _read_from_elsewhere(nodes: Iterable[Node], places: Places) -> set[Value]:
    """Return the values that nodes read from other places."""
    return {v for node in nodes for v in node.ins if places.get(v) != places[node]}


def _split_recomputation(step: _RankStep, places: Places) -> Places:
    """Move the nodes of the backward pass that read forward values only to R."""
    moved = dict(places)
    for node in step.nodes:
        place = moved.get(node, EPILOGUE)
        if place.part in ("B", "W") and node.ins and all(_is_forward(v, moved) for v in node.ins):
            moved |= _runs_at(node, place._replace(part="R"))
    return moved


def _is_forward(v: Value, places: Places) -> bool:
    return v not in places or places[v].part in ("always", "F", "R")


def _rank_parts(step: _RankStep, places: Places, actions: Sequence[PartPlace]) -> RankParts:
    """Return the programs at the places of `actions`, before them and after them, and the values between them."""
    whole = step.program
    places = _postpone_placeholders(step, places, {PROLOGUE, *actions, EPILOGUE})
    nodes = _nodes_at([PROLOGUE, *actions, EPILOGUE], step, places)
    crossings = tuple(c for c in step.crossings.values() if c.source in nodes or c.target in nodes)
    terms = _terms_at_end(step, places, nodes[EPILOGUE])
    wanted = _read_from_elsewhere(chain.from_iterable(nodes.values()), places).union(
        (c.operand for c in crossings), (x for x, _ in terms), (v for _, v in whole.writes)
    )
    outputs: dict[PartPlace, object] = {place: _results_in(members, wanted) for place, members in nodes.items()}
    outputs[EPILOGUE] = whole.outputs
    programs = {place: _program_of(members, outputs[place], whole) for place, members in nodes.items()}
    gives = {place: tuple(values_in(given)) for place, given in outputs.items()}
    return RankParts(whole.inputs, step.stages, programs, gives, crossings, terms, _renewed_here(step, places))


def _nodes_at(here: Iterable[PartPlace], step: _RankStep, places: Places) -> Mapping[PartPlace, Sequence[Node]]:
    """Return the nodes at each place of this rank, in order."""
    nodes: dict[PartPlace, list[Node]] = {place: [] for place in here}
    for node in step.nodes:
        if places.get(node) in nodes:
            nodes[places[node]].append(node)
    return nodes


def _renewed_here(step: _RankStep, places: Places) -> tuple[tuple[Value, Value], ...]:
    """Return the pairs of a buffer and its new value whose new value is computed on this rank or given."""
    return tuple((x, v) for x, v in step.program.writes if v not in places or _is_here(v, step, places))


def _postpone_placeholders(step: _RankStep, places: Places, here: Collection[PartPlace]) -> Places:
    """Move placeholders for the gradients of other ranks' parameters into the part after all microbatches."""
    moved = dict(places)
    for node in step.nodes:
        if node in places and places[node] not in here and not node.ins:
            moved |= _runs_at(node, EPILOGUE)
    return moved


def _terms_at_end(step: _RankStep, places: Places, behind: Sequence[Node]) -> tuple[tuple[Value, Value], ...]:
    """Return the pairs (term, sum) of values of each microbatch that are read behind, or are results of the step."""
    read = [v for node in behind for v in node.ins] + list(values_in(step.program.outputs))
    sums = (v for v in dict.fromkeys(read) if v in places and places[v].part in ("F", "B", "W"))
    return tuple((x, v) for v in sums for x in _terms_of(v, step, places))


def _results_in(nodes: Sequence[Node], wanted: Collection[Value]) -> tuple[Value, ...]:
    return tuple(v for node in nodes for v in node.outs if v in wanted)


def _program_of(nodes: Sequence[Node], outputs: object, whole: Program) -> Program:
    inputs = read_by(nodes, values_in(outputs), whole.inputs, whole.specs)
    known = {v for node in nodes for v in node.outs} | {i.value for i in inputs}
    specs = {v: spec for v, spec in whole.specs.items() if v in known}
    return Draft(Program(inputs, tuple(nodes), outputs, rank=whole.rank, specs=specs)).finish()


def read_by(
    nodes: Sequence[Node], results: Iterable[Value], known: Iterable[Input], specs: Mapping[Value, Spec]
) -> tuple[Input, ...]:
    """Return the inputs of a program of these nodes and results: `known` inputs, and outputs of other programs."""
    made = {v for node in nodes for v in node.outs}
    given = {i.value: i for i in known}
    read = dict.fromkeys(v for v in [*(v for node in nodes for v in node.ins), *results] if v not in made)
    return tuple(given.get(v) or Input(v, "saved", v.name, specs.get(v), v) for v in read)


def _latest(places: Iterable[PartPlace]) -> PartPlace:
    return max(places, key=lambda p: (p.part == "B", p.chunk))
