"""Table of the layouts of a program's values, with a text form that can be parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.layout import MOST_TEXT, ProcessMesh, Spec, parse_spec

from .._errors import ProgramError


@dataclass(frozen=True, slots=True)
class Layouts:
    """The spec of each value by name. `reasons` say where a spec comes from, such as "mark", "forward" or "default".

    The text has one line per value. It can be edited and parsed again with `parse_layouts`.
    """

    specs: Mapping[str, Spec]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        width = max((len(n) for n in self.specs), default=0)
        rows = [f"{n:{width}}  {spec!r}" for n, spec in self.specs.items()]
        longest = max(map(len, rows), default=0)
        notes = [self.reasons.get(n) for n in self.specs]
        return "\n".join(f"{row:{longest}}  # {why}" if why else row for row, why in zip(rows, notes, strict=True))


MOST_LINES = 50_000
"""Maximum number of lines of a layouts text."""


def parse_layouts(text: str, mesh: ProcessMesh | Mapping[str, ProcessMesh]) -> dict[str, Spec]:
    """Return the spec of each name in a text written by `str(layouts)`. `mesh` is one mesh for all, or a mesh by name.

    Raises:
        ProgramError: a line is invalid (the message has its number), a name has no mesh, or the text is too long.
    """
    found: dict[str, Spec] = {}
    if len(text) > MOST_TEXT or text.count("\n") > MOST_LINES:
        raise ProgramError(
            "layouts in text",
            f"{len(text)} characters",
            f"the limit is {MOST_TEXT} characters and {MOST_LINES} lines",
            "write lines such as batch_0  f32[8@dp, 1024]",
        )
    for number, line in enumerate(text.splitlines(), 1):
        body = line.split("#")[0].strip()
        if not body:
            continue
        name, _, spec = body.partition(" ")
        if not spec.strip():
            raise ProgramError(
                f"line {number} of layouts",
                repr(line),
                "a line consists of the name of a value and its spec",
                "write lines such as batch_0  f32[8@dp, 1024]",
            )
        if not isinstance(mesh, ProcessMesh) and name not in mesh:
            known = ", ".join(list(mesh)[:5])
            raise ProgramError(
                f"the layout of {name!r}", f"meshes of {known}", "the value has no mesh", "add a mesh for this name"
            )
        found[name] = parse_spec(spec.strip(), mesh if isinstance(mesh, ProcessMesh) else mesh[name])
    return found
