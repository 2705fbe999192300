"""The mutants of a source file, made by mutmut's mutators, and a seeded sample of them.

A mutant differs from the source in one expression or statement. One mutant of each syntax node is kept, chosen by hash,
so that a call with five arguments counts no more than a comparison. The sample orders mutants by a hash of the seed,
the file, the source line and the replacement. So a change of one line leaves the rest of the sample as it is.

These mutants are left out, because no test should have to notice them:

- type annotations, type aliases, `cast`, `TypeVar` and `if TYPE_CHECKING`, which have no effect at run time;
- docstrings, and every text inside `raise`, an error, a warning, `__repr__`, `__str__` and `_errors.py`: wording is
  free;
- `strict=` of `zip`, which is an assertion;
- strings with other letter case (a string that becomes "XX…XX" is kept), and `None` in place of `False`;
- imports, `__init__.py`, `__all__`, `__slots__` and decorators;
- `len(…)` and `isinstance(…)` with other arguments (mutmut leaves them out too).
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

UNTOUCHED_CALLS = {"len", "isinstance", "cast", "TypeVar", "ParamSpec", "NewType", "warn"}
UNTOUCHED_NAMES = {"__all__", "__slots__"}
TEXT_FUNCTIONS = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    `line` is the number of the first changed line. `before` and `after` are the changed lines without indentation.
    `key` stays the same under changes elsewhere in the file.
    """

    file: str
    line: int
    before: str
    after: str
    key: str
    code: str

    @property
    def diff(self) -> str:
        """Return the change as a unified diff without context."""
        old, new = self.before.splitlines(), self.after.splitlines()
        return "\n".join([*(f"- {line}" for line in old), *(f"+ {line}" for line in new)])


def sample(root: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return the first `count` mutants of the packages, in the order of their hashes."""
    places = [place for package in packages for place in _package_places(root, package, seed)]
    chosen = sorted(places, key=lambda place: place.key)[:count]
    return [place.mutant(root) for place in chosen]


@dataclass(frozen=True)
class _Place:
    """A syntax node of a file, with the replacement chosen for it."""

    file: str
    module: cst.Module
    node: cst.CSTNode
    new: cst.CSTNode
    key: str

    def mutant(self, root: Path) -> Mutant:
        source = (root / self.file).read_text()
        code = self.module.deep_replace(self.node, self.new).code
        line, before, after = _difference(source, code)
        return Mutant(self.file, line, before, after, self.key, code)


def _package_places(root: Path, package: str, seed: int) -> Iterator[_Place]:
    for path in sorted((root / "src" / "meshwright" / package).rglob("*.py")):
        if path.name != "__init__.py":
            yield from _file_places(root, path, seed)


def _file_places(root: Path, path: Path, seed: int) -> Iterator[_Place]:
    file, source = str(path.relative_to(root)), path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    visitor = _Nodes(only_text=path.name == "_errors.py")
    wrapper.visit(visitor)
    lines, seen = source.splitlines(), Counter[str]()
    for node, line, variants in visitor.found:
        old = wrapper.module.code_for_node(node)
        text = f"{lines[line - 1].strip()}|{old}"
        seen[text] += 1
        hashes = [(_hash(seed, file, text, seen[text], wrapper.module.code_for_node(new)), new) for new in variants]
        key, new = min(hashes, key=lambda pair: pair[0])
        yield _Place(file, wrapper.module, node, new, _hash(key))


def _hash(*words: object) -> str:
    return hashlib.sha256("|".join(map(str, words)).encode()).hexdigest()[:16]


def _difference(source: str, code: str) -> tuple[int, str, str]:
    old, new = source.splitlines(), code.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changes = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    first, last = changes[0], changes[-1]
    return first[1] + 1, _stripped(old[first[1] : last[2]]), _stripped(new[first[3] : last[4]])


def _stripped(lines: Iterable[str]) -> str:
    return "\n".join(line.strip() for line in lines)


class _Nodes(cst.CSTVisitor):
    """A visitor that collects the nodes that may be mutated, with their lines and mutants."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, only_text: bool) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, int, list[cst.CSTNode]]] = []
        self._text_depth = int(only_text)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node) or (self._text_depth and isinstance(node, cst.BaseString)):
            return False
        self._text_depth += _holds_text(node)
        variants = [new for kind, mutate in mutation_operators if isinstance(node, kind) for new in mutate(node)]
        variants = [new for new in variants if not _is_idle(node, new)]
        if variants:
            line = self.get_metadata(PositionProvider, node).start.line
            self.found.append((node, line, variants))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._text_depth -= _holds_text(original_node)


def _holds_text(node: cst.CSTNode) -> bool:
    """True if only people read the strings inside `node`."""
    return isinstance(node, cst.FunctionDef) and node.name.value in TEXT_FUNCTIONS


def _is_left_out(node: cst.CSTNode) -> bool:
    """True if nothing inside `node` is mutated."""
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom() | cst.Raise():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.Call(func=cst.Name(value=name)) | cst.Call(func=cst.Attribute(attr=cst.Name(value=name))):
            return name in UNTOUCHED_CALLS or name.endswith(("Error", "Warning"))
        case cst.If(test=cst.Name(value="TYPE_CHECKING")) | cst.Arg(keyword=cst.Name(value="strict")):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value):
            return name in UNTOUCHED_NAMES or _is_alias(name, value)
        case _:
            return False


def _is_alias(name: str, value: cst.BaseExpression) -> bool:
    """True if an assignment looks like a type alias: `Range = tuple[int, int]`, `Dim = A | B`."""
    camel = name.lstrip("_")[:1].isupper() and not name.isupper()
    union = isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.BitOr)
    return camel and (union or isinstance(value, cst.Subscript))


def _is_idle(node: cst.CSTNode, new: cst.CSTNode) -> bool:
    """True if `new` only differs in the letter case of a string, in `strict=`, or by None in place of False."""
    if isinstance(node, cst.SimpleString) and isinstance(new, cst.SimpleString):
        return node.value.lower() == new.value.lower()
    if isinstance(node, cst.Call) and isinstance(new, cst.Call):
        pairs = zip(node.args, new.args, strict=False) if len(node.args) == len(new.args) else ()
        return _strictness(node) != _strictness(new) or any(_is_none_for_false(a.value, b.value) for a, b in pairs)
    if isinstance(node, cst.Assign | cst.AnnAssign) and isinstance(new, cst.Assign | cst.AnnAssign):
        return _is_none_for_false(node.value, new.value)
    return False


def _is_none_for_false(old: cst.BaseExpression | None, new: cst.BaseExpression | None) -> bool:
    names = isinstance(old, cst.Name) and isinstance(new, cst.Name)
    return names and (old.value, new.value) == ("False", "None")


def _strictness(call: cst.Call) -> list[str]:
    values = [a.value for a in call.args if a.keyword and a.keyword.value == "strict"]
    return [value.value for value in values if isinstance(value, cst.Name)]
