"""Detection of ranks that can share one program, because their local tensors have equal shapes."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.layout import JsonValue, Spec

from ..program.node import Conversion
from ..program.program import Program
from .decode import Decoder
from .encode import Encoder


def specs_in(program: Program) -> frozenset[Spec]:
    """Return the specs of all tensors that the program takes, makes and converts."""
    carried = [n.op for n in program.nodes if isinstance(n.op, Conversion)]
    given = [i.spec for i in program.inputs if i.spec is not None]
    found = {*program.specs.values(), *given, *(op.src for op in carried), *(op.dst for op in carried)}
    return frozenset(s.concrete for s in found)


def are_alike(specs: Iterable[Spec], one: int, other: int) -> bool:
    """True if one program serves both ranks: they are in the same meshes and all local shapes are equal."""
    return one == other or all(
        (one in s.mesh) == (other in s.mesh) and s.local_shape(one) == s.local_shape(other) for s in specs
    )


def first_alike(specs: Iterable[Spec], rank: int) -> int:
    """Return the lowest rank that can share the program of `rank`."""
    return next(r for r in range(rank + 1) if are_alike(specs, r, rank))


def specs_data(specs: Iterable[Spec]) -> dict[str, JsonValue]:
    """Return specs without symbols as JSON data, in the order of their texts."""
    encoder = Encoder()
    for spec in sorted(specs, key=lambda s: f"{s!r} on {s.mesh!r}"):
        encoder.spec(spec)
    return {"meshes": encoder.mesh_rows, "specs": encoder.spec_rows}


def read_specs(data: JsonValue) -> frozenset[Spec]:
    """Return the specs that `specs_data` wrote. Raises DataError for other data."""
    return frozenset(Decoder({}).read_specs(data))
