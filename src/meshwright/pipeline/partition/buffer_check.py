"""Check of buffers that each microbatch renews: a table must pass them from one microbatch to the next in order."""

from __future__ import annotations

from meshwright.graph import Node, Program, Value

from .._errors import StageError
from ..table.action import ActionKind
from ..table.schedule import Row, Schedule, atoms_of


def check_renewed(program: Program, schedule: Schedule) -> None:
    """Raise StageError if a microbatch would read a buffer of the captured program as another microbatch left it.

    That can happen if several chunks read or renew one buffer. If the chunks are on different ranks, the next
    microbatch reads the buffer before this one has renewed it.
    """
    for x, v in program.writes:
        reads = set(map(_chunk, program.users.get(x, ())))
        written = _chunks_that_make(v, program)
        chunks = {c for c in reads | written if c >= 0}
        if len(chunks) < 2:
            continue
        if schedule.microbatches > 1 and len(_rows_with(chunks, schedule)) > 1:
            raise _different_ranks(x, chunks, schedule)
        if max(reads) > max(written) or not all(_is_in_order(row, chunks) for row in schedule.rows):
            numbers = " and ".join(map(str, sorted(chunks)))
            raise StageError(
                f"schedule {schedule.name!r}",
                f"the buffer {x!r}, which chunks {numbers} read or update",
                "a microbatch would read the value that another one left",
                "use a schedule with one chunk per rank, such as 1F1B, or keep all uses of the buffer in one chunk",
            )


def _chunks_that_make(v: Value, program: Program) -> set[int]:
    return {_chunk(node) for node in program.nodes if v in node.outs}


def _rows_with(chunks: set[int], schedule: Schedule) -> set[int]:
    """Return the numbers of the rows that run these chunks."""
    return {n for n, row in enumerate(schedule.rows) if any(atom.chunk in chunks for atom in atoms_of(row))}


def _different_ranks(x: Value, chunks: set[int], schedule: Schedule) -> StageError:
    numbers = " and ".join(map(str, sorted(chunks)))
    return StageError(
        f"{schedule.microbatches} microbatches by schedule {schedule.name!r}",
        f"the buffer {x!r}, which chunks {numbers} on different ranks read or update",
        "an early stage reads it for the next microbatch before a later stage has updated it",
        "hold the buffer in a layer of the stage that reads and updates it, pass accumulate_steps=1, or use "
        'mw.microbatched(…, schedule="GPipe")',
    )


def _chunk(node: Node) -> int:
    """Return the chunk in which a node's operands are read; -1 if it has no chunk."""
    edge, chunk = node.origin.edge, node.origin.chunk
    if edge is not None:
        return edge.source
    return -1 if chunk is None else chunk


def _is_in_order(row: Row, chunks: set[int]) -> bool:
    """True if the forward passes of these chunks take the microbatches in ascending order."""
    atoms = atoms_of(row)
    found = [atom.microbatch for atom in atoms if atom.kind is ActionKind.FORWARD and atom.chunk in chunks]
    return found == sorted(found)
