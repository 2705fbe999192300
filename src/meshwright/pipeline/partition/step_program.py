"""A pipeline step as one program and a table of names, and back: all parts of a rank, one after the other.

The program can be read, and written to a file. The table is plain data. It gives the range of nodes of each part, and
the values that pass from one part to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from meshwright.graph import Change, Conversion, FreshNames, Input, Node, Program, Value, map_values, values_in
from meshwright.layout import JsonValue, Spec
from meshwright.reshard import Exchange

from ..table.parser import parse_schedule
from ..table.schedule import Schedule
from .epilogue import MicrobatchSum
from .microbatch_inputs import MicrobatchInput, MicrobatchInputs
from .stages import Stages
from .step_parts import EPILOGUE, PROLOGUE, Crossing, PartKind, PartPlace, RankParts, read_by

Table = Mapping[str, JsonValue]


def write_step_program(
    copies: Sequence[RankParts], intake: MicrobatchInputs, schedule: Schedule
) -> tuple[Program, Table]:
    """Return the parts of all copies, copy by copy, and the work after them, as one program; and the table for it.

    Every value of the program has its own name.
    """
    writer = _Writer(copies[0].programs[PROLOGUE].rank)
    for given in (*intake.inputs, *(i for parts in copies for i in parts.inputs)):
        writer.take(given)
    rows = [writer.copy(parts) for parts in copies]
    behind = copies[0].programs[EPILOGUE]
    begin, end = writer.nodes_of(behind)
    table = {
        "schedule": str(schedule),
        "copies": rows,
        "behind": [begin, end, [[writer.name(i.value), *writer.source(i)] for i in behind.inputs if i.role == "saved"]],
        "inputs": len(intake.inputs),
        "copy of": list(intake.copies),
        "feeds": [[[writer.name(f.value), writer.name(f.given), f.is_piece] for f in row] for row in intake.feeds],
    }
    return writer.program(behind), table


@dataclass
class _Writer:
    """The program written so far; `new` maps the values of the parts to its values."""

    rank: int
    inputs: list[Input] = field(default_factory=list[Input])
    nodes: list[Node] = field(default_factory=list[Node])
    specs: dict[Value, Spec] = field(default_factory=dict[Value, Spec])
    changes: list[Change] = field(default_factory=list[Change])
    new: dict[Value, Value] = field(default_factory=dict[Value, Value])
    _known: set[Value] = field(default_factory=set[Value])
    _names: FreshNames = field(default_factory=lambda: FreshNames(iter(())))

    def written(self, v: Value) -> Value:
        if v not in self.new:
            self.new[v] = Value(self._names.fresh(v.name), v.shape, v.dtype, v.device)
        return self.new[v]

    def name(self, v: Value) -> str:
        return self.written(v).name

    def take(self, given: Input) -> None:
        """Add an input, if it is not there yet."""
        if given.value not in self._known:
            self._known.add(given.value)
            self.inputs.append(replace(given, value=self.written(given.value)))

    def add(self, node: Node) -> None:
        for v in node.ins:
            self.take(Input(v, "saved", v.name))  # the value of another rank, or a sum
        args, kwargs = map_values(self.written, (node.args, dict(node.kwargs)))
        self.nodes.append(Node(node.op, args, kwargs, map_values(self.written, node.out), node.origin))
        self._known.update(node.outs)

    def nodes_of(self, program: Program) -> tuple[int, int]:
        """Write the nodes of a part; return the index of its first node, and the index after its last node."""
        begin = len(self.nodes)
        for node in program.nodes:
            self.add(node)
        self.specs |= {self.written(v): spec for v, spec in program.specs.items()}
        self.changes += program.changes
        return begin, len(self.nodes)

    def copy(self, parts: RankParts) -> Table:
        """Write the parts of a copy; return its entry in the table."""
        rows: list[Any] = []
        crossings: list[Any] = []
        for place in sorted(parts.programs, key=_run_order):
            if place == EPILOGUE:
                continue
            crossings += self._crossings(c for c in parts.crossings if c.target == place)
            program = parts.programs[place]
            begin, end = self.nodes_of(program)
            pairs = zip(parts.gives[place], values_in(program.outputs), strict=True)
            rows.append([*place, begin, end, [[self.name(v), self.name(w)] for v, w in pairs]])
            away = (c for c in parts.crossings if c.source == place and c.target not in parts.programs)
            crossings += self._crossings(away)
        return {
            "stages": [list(map(list, parts.stages.ranks)), list(parts.stages.way)],
            "parts": rows,
            "crossings": crossings,
            "terms": [[self.name(x), self.name(v)] for x, v in parts.terms],
            "renewed": [[self.name(x), self.name(v)] for x, v in parts.renewed],
        }

    def _crossings(self, found: Iterable[Crossing]) -> Iterator[Any]:
        for c in found:
            self.add(Node(c.carry, (c.operand,), {}, c.result))
            yield [len(self.nodes) - 1, list(c.source), list(c.target), c.tag]

    def source(self, given: Input) -> tuple[bool, str]:
        """Return True if an input of the program behind is a sum over all microbatches, and the name of the value."""
        of_total = isinstance(given.source, MicrobatchSum)
        return of_total, self.name(given.source.of if of_total else given.source)

    def program(self, behind: Program) -> Program:
        outputs = map_values(self.written, behind.outputs)
        for v in behind.results:
            self.take(Input(v, "saved", v.name))
        writes = tuple((self.written(x), self.written(v)) for x, v in behind.writes)
        specs = {v: spec for v, spec in self.specs.items() if v in {self.new[w] for w in self._known}}
        return Program(tuple(self.inputs), tuple(self.nodes), outputs, writes, tuple(self.changes), self.rank, specs)


def _run_order(place: PartPlace) -> tuple[int, ...]:
    """Sort key: parts in an order in which each part reads only outputs of earlier parts."""
    part, chunk = place
    if part in ("R", "B"):
        return (2, -chunk, part == "B")
    return ({"always": 0, "F": 1, "W": 3, "end": 4}[part], chunk)


def read_step_program(program: Program, table: Table) -> tuple[tuple[RankParts, ...], MicrobatchInputs, Schedule]:
    """Return the parts, intake and schedule that `write_step_program` wrote.

    Raises:
        LookupError, TypeError, ValueError: the table belongs to another program.
    """
    reader = _Reader(program)
    schedule = parse_schedule(table["schedule"])
    copies = tuple(map(reader.copy, table["copies"]))
    behind = reader.behind(*table["behind"])
    programs = ({**parts.programs, EPILOGUE: Program((), (), None) if n else behind} for n, parts in enumerate(copies))
    copies = tuple(replace(parts, programs=p) for parts, p in zip(copies, programs, strict=True))
    feeds = tuple(
        tuple(
            MicrobatchInput(reader.value_of(value), reader.value_of(given), is_piece is True)
            for value, given, is_piece in row
        )
        for row in table["feeds"]
    )
    copy_of = tuple(range(len(copies))[n] for n in table["copy of"])
    return copies, MicrobatchInputs(program.inputs[: table["inputs"]], copy_of, feeds), schedule


class _Reader:
    """The values of a program by their names."""

    def __init__(self, whole: Program) -> None:
        self.whole = whole
        self.known = {v.name: v for v in (*(i.value for i in whole.inputs), *(v for n in whole.nodes for v in n.outs))}
        self.inputs = tuple(i for i in whole.inputs if i.role != "saved")

    def value_of(self, name: str) -> Value:
        return self.known[name]

    def output(self, name: str, v: Value) -> Value:
        """Return the value that a part outputs as `v`. It may be read only by another rank or by a sum."""
        return self.known.setdefault(name, Value(name, v.shape, v.dtype, v.device))

    def copy(self, row: Table) -> RankParts:
        ranks, way = row["stages"]
        programs: dict[PartPlace, Program] = {}
        gives: dict[PartPlace, tuple[Value, ...]] = {EPILOGUE: ()}
        for part, chunk, begin, end, given in row["parts"]:
            place = _read_place(part, chunk)
            outputs = tuple(self.value_of(name) for _, name in given)
            programs[place] = self._program(begin, end, outputs, outputs)
            gives[place] = tuple(self.output(name, v) for (name, _), v in zip(given, outputs, strict=True))
        terms = tuple((self.value_of(x), self.output(v, self.value_of(x))) for x, v in row["terms"])
        renewed = tuple((self.value_of(x), self.value_of(v)) for x, v in row["renewed"])
        stages = Stages(tuple(map(tuple, ranks)), tuple(way))
        crossings = tuple(self._crossing(*each) for each in row["crossings"])
        return RankParts(self.inputs, stages, programs, gives, crossings, terms, renewed)

    def _program(self, begin: int, end: int, outputs: object, results: Iterable[Value]) -> Program:
        nodes, specs = self.whole.nodes[begin:end], self.whole.specs
        return Program(read_by(nodes, results, self.inputs, specs), nodes, outputs, rank=self.whole.rank, specs=specs)

    def _crossing(self, number: int, source: JsonValue, target: JsonValue, tag: int) -> Crossing:
        node = self.whole.nodes[number]
        if not isinstance(node.op, Conversion) or not isinstance(node.op.step, Exchange):
            raise TypeError(f"node {number} is {node.op!r}, not an exchange")
        (operand,), (result,) = node.ins, node.outs
        return Crossing(node.op, operand, result, _read_place(*source), _read_place(*target), int(tag))

    def behind(self, begin: int, end: int, sources: JsonValue) -> Program:
        whole = self.whole
        results = [v for pair in whole.writes for v in pair] + list(values_in(whole.outputs))
        program = self._program(begin, end, whole.outputs, results)
        found = {
            self.value_of(name): MicrobatchSum(self.value_of(v)) if is_sum is True else self.value_of(v)
            for name, is_sum, v in sources
        }
        inputs = tuple(replace(i, source=found[i.value]) if i.role == "saved" else i for i in program.inputs)
        return replace(program, inputs=inputs, writes=whole.writes)


def _read_place(part: JsonValue, chunk: JsonValue) -> PartPlace:
    if part not in get_args(PartKind):
        raise ValueError(f"{part!r} is not a part of a step")
    return PartPlace(part, int(chunk))
