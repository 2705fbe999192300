"""How the values of a program lie, as a table in text that parses back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.layout import MOST_TEXT, ProcessMesh, Spec, parse_spec

from ._errors import ProgramError


@dataclass(frozen=True, slots=True)
class Layouts:
    """How each value lies, by name; `reasons` say what tells so: "mark", "forward", "backward" or "default".

    Its text has a line per value and parses back (`parse_layouts`), so that it may be edited.
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
"""Lines of layouts in text."""


def parse_layouts(text: str, mesh: ProcessMesh | Mapping[str, ProcessMesh]) -> dict[str, Spec]:
    """Name → spec of a text as `str(layouts)` gives it; `mesh` is that of all, or by name.

    Raises ProgramError for a line that is none, naming it.
    """
    found: dict[str, Spec] = {}
    if len(text) > MOST_TEXT or text.count("\n") > MOST_LINES:
        raise ProgramError(
            "layouts in text", f"{len(text)} characters", f"such a text has {MOST_TEXT} characters, {MOST_LINES} lines",
            "batch_0  f32[8@dp, 1024]",
        )  # fmt: skip
    for number, line in enumerate(text.splitlines(), 1):
        body = line.split("#")[0].strip()
        if not body:
            continue
        name, _, spec = body.partition(" ")
        if not spec.strip():
            raise ProgramError(
                f"line {number} of layouts", repr(line), "a line has the name of a value and its spec",
                "batch_0  f32[8@dp, 1024]",
            )  # fmt: skip
        if not isinstance(mesh, ProcessMesh) and name not in mesh:
            known = ", ".join(list(mesh)[:5])
            raise ProgramError(f"the layout of {name!r}", f"meshes of {known}", "it has no mesh", "a name of a value")
        found[name] = parse_spec(spec.strip(), mesh if isinstance(mesh, ProcessMesh) else mesh[name])
    return found
