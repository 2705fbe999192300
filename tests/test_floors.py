"""The house has floors: a room looks only down, and only through the front door of the room it looks at.

Each law is a function from one source file to the offences in it, so the laws themselves are tested on small texts.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"

FLOORS = [
    {"layout"},
    {"spmd", "reshard"},
    {"cost", "comm"},
    {"tensor", "checkpoint"},
    {"graph"},
    {"passes", "pipeline"},
    {"search"},
    {"engine"},
    {"models", "report"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
DOOR = "engine"  # `import meshwright as mw` reaches what this room gives

FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}
MOST_CODE_LINES = 500
# What a room must not know of torch (DESIGN: the table of rooms).
BLIND_TO = {"layout": "torch.distributed", "spmd": "torch.distributed", "reshard": "torch.distributed"}


@dataclass(frozen=True)
class Import:
    """One imported module, and the names taken from it; `inside` tells that a function body holds it."""

    module: str
    names: tuple[str, ...]
    line: int
    inside: bool

    @property
    def modules(self) -> tuple[str, ...]:
        """Every dotted name that the statement may load: `from a import b` may be module `a.b`."""
        return (self.module, *(f"{self.module}.{name}" for name in self.names))


@dataclass(frozen=True)
class Source:
    """One file of the package: its path below the package, and its text."""

    path: str
    text: str

    @property
    def room(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        inside = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(function)
        }
        return tuple(
            Import(module, names, node.lineno, id(node) in inside)
            for node in ast.walk(self.tree)
            for module, names in self._imported(node)
        )

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            folder = ("meshwright/" + self.path).split("/")[: -node.level] if node.level else []
            module = ".".join([*folder, *filter(None, [node.module])])
            yield module, tuple(alias.name for alias in node.names)

    @cached_property
    def rooms(self) -> tuple[tuple[str, str, Import], ...]:
        """(other room or "" for the door, what is behind it, import) of each import from this package."""
        found: list[tuple[str, str, Import]] = []
        for item in self.imports:
            head, _, rest = item.module.partition(".")
            if head != "meshwright":
                continue
            if rest:
                found.append((*rest.partition(".")[::2], item))
            else:
                found += [(name if name in FLOOR else "", "", item) for name in item.names or ("",)]
        return tuple(found)


Law = Callable[[Source], Iterator[str]]


def looks_only_down(source: Source) -> Iterator[str]:
    if source.room not in FLOOR:
        return
    for other, _, item in source.rooms:
        if other != source.room and FLOOR.get(other or DOOR, len(FLOORS)) >= FLOOR[source.room]:
            yield f"{item.line}: {source.room} imports {other or 'meshwright'}, which is not below it"


def enters_by_the_front_door(source: Source) -> Iterator[str]:
    for other, behind, item in source.rooms:
        private = [name for name in item.names if name.startswith("_") and not name.startswith("__")]
        if other and other != source.room and (behind or private):
            yield f"{item.line}: {item.module} {' '.join(private)} is behind the door of {other}"


def imports_at_the_top(source: Source) -> Iterator[str]:
    if source.room == "cli":  # `meshwright --help` must not wait for torch
        return
    for other, _, item in source.rooms:
        if item.inside and source.room and other != source.room:
            yield f"{item.line}: {item.module} is imported inside a function"


def has_a_name_of_its_own(source: Source) -> Iterator[str]:
    names = {Path(source.path).stem.strip("_"), *Path(source.path).parent.parts}
    for name in sorted(names & FORBIDDEN_NAMES):
        yield f"1: {name} says nothing about what the file knows"


def fits_in_a_head(source: Source) -> Iterator[str]:
    if (lines := count_code_lines(source)) > MOST_CODE_LINES:
        yield f"1: {lines} lines of code, at most {MOST_CODE_LINES}"


def hides_private_torch(source: Source) -> Iterator[str]:
    if source.path.endswith("/torch_hooks.py"):
        return
    for item in source.imports:
        for module in item.modules:
            if is_private_torch(module):
                yield f"{item.line}: {module} belongs in torch_hooks.py"
                break
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private_torch(ast.unparse(node)):
            yield f"{node.lineno}: {ast.unparse(node)} belongs in torch_hooks.py"


def stays_blind(source: Source) -> Iterator[str]:
    for item in source.imports:
        unseen = BLIND_TO.get(source.room)
        if unseen and any(f"{module}.".startswith(f"{unseen}.") for module in item.modules):
            yield f"{item.line}: {source.room} must not know {unseen}"


LAWS: list[Law] = [
    looks_only_down,
    enters_by_the_front_door,
    imports_at_the_top,
    has_a_name_of_its_own,
    fits_in_a_head,
    hides_private_torch,
    stays_blind,
]


def is_private_torch(name: str) -> bool:
    """Whether the last part of a dotted name below torch is private; operator names (`torch.ops…`) are data."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def count_code_lines(source: Source) -> int:
    """Lines that hold a token other than a comment or a docstring."""
    texts = {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    lines = {line for token in tokens if token.type not in silent for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)


def package() -> list[Source]:
    return [Source(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_package_keeps_the_law(law: Law) -> None:
    offences = [f"{source.path}:{offence}" for source in package() for offence in law(source)]
    assert not offences, "\n".join(offences)


def test_each_room_has_a_floor() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(FLOOR)


@pytest.mark.parametrize(
    ("law", "path", "text"),
    [
        (looks_only_down, "layout/_mesh.py", "from meshwright.spmd import Rule"),
        (looks_only_down, "spmd/notation/rule.py", "from ..reshard import plan"),
        (looks_only_down, "tensor/_dist.py", "import meshwright as mw"),
        (looks_only_down, "layout/_mesh.py", "from meshwright import engine"),
        (enters_by_the_front_door, "spmd/notation/rule.py", "from meshwright.layout._mesh import ProcessMesh"),
        (enters_by_the_front_door, "spmd/notation/rule.py", "from meshwright.layout import _mesh"),
        (enters_by_the_front_door, "spmd/notation/rule.py", "import meshwright.layout._mesh"),
        (imports_at_the_top, "comm/_run.py", "def f():\n    from meshwright.layout import Shard"),
        (has_a_name_of_its_own, "spmd/_utils.py", ""),
        (has_a_name_of_its_own, "spmd/helpers/_rule.py", ""),
        (fits_in_a_head, "spmd/notation/rule.py", "x = 1\n" * 501),
        (hides_private_torch, "comm/_run.py", "from torch._C import Graph"),
        (hides_private_torch, "comm/_run.py", "from torch.distributed import _functional_collectives"),
        (hides_private_torch, "comm/_run.py", "import torch\ntorch._C._get_tracing_state()"),
        (stays_blind, "layout/_mesh.py", "from torch import distributed"),
    ],
)
def test_a_law_sees_an_offence(law: Law, path: str, text: str) -> None:
    assert list(law(Source(path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("spmd/notation/rule.py", "from meshwright.layout import Shard\nfrom meshwright.spmd._text import parse"),
        ("spmd/notation/rule.py", "from ._text import parse\nfrom . import _text"),
        ("models/_llama.py", "import meshwright as mw\nfrom meshwright import Shard"),
        ("cli/commands/main.py", "def f():\n    from meshwright.models import train"),
        ("comm/torch_hooks.py", "from torch._C import Graph"),
        ("tensor/_dist.py", "import torch\ntorch.ops.aten._softmax\ntorch.Tensor.__add__"),
        ("tensor/_dist.py", '"""Text."""\n' + "# note\n\n" * 600 + "x = 1"),
    ],
)
def test_the_laws_leave_good_code_alone(path: str, text: str) -> None:
    assert not [offence for law in LAWS for offence in law(Source(path, text))]
