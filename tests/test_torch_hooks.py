"""Each private name of torch that a package uses is in its `torch_hooks.py`, with its reason, and still exists.

A new torch release that moves one of them fails here, by name, before anything else.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"


@dataclass(frozen=True)
class Hooks:
    """The `torch_hooks.py` of one package."""

    path: Path

    @property
    def package(self) -> str:
        return self.path.parent.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def defined(self) -> Iterator[tuple[str, ast.stmt]]:
        """Yield (name, statement) of each public name that the file defines."""
        for node in self.tree.body:
            yield from ((name, node) for name in defined(node) if not name.startswith("_"))

    def imported(self) -> Iterator[tuple[str, ast.stmt]]:
        """Yield (name, statement) of each private name that the file imports from torch."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                full = ((alias, f"{node.module}.{alias.name}") for alias in node.names)
                yield from ((alias.asname or alias.name, node) for alias, name in full if is_private_torch(name))

    def users(self, name: str) -> Iterator[ast.stmt]:
        """Yield the definitions that use an imported name: their explanations count for it, too."""
        for node in self.tree.body:
            if defined(node) and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node)):
                yield node

    def private(self) -> set[str]:
        """Return every private dotted name below torch that the file imports or writes out."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
        return {name for name in names if is_private_torch(name)}

    def explains(self, name: str, node: ast.stmt) -> bool:
        """True if a docstring, a string below it, a comment beside or above it, or the file's docstring explains it."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            return True
        if f"`{name}`" in (ast.get_docstring(self.tree) or ""):
            return True
        follower = self.tree.body[self.tree.body.index(node) + 1 :][:1]
        if any(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in follower):
            return True
        lines = ["", *self.text.splitlines()]
        beside = lines[node.lineno : (node.end_lineno or node.lineno) + 1]
        return lines[node.lineno - 1].lstrip().startswith("#") or any("#" in line for line in beside)


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("__")]


def is_private_torch(name: str) -> bool:
    head, *parts = name.split(".")
    return head == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


HOOKS = [Hooks(path) for path in sorted(PACKAGE.rglob("torch_hooks.py"))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of imports of torch's own modules
@pytest.mark.parametrize(
    "name", [pytest.param(name, id=f"{hooks.package}-{name}") for hooks in HOOKS for name in sorted(hooks.private())]
)
def test_torch_still_has_the_name(name: str) -> None:
    pkgutil.resolve_name(name)


@pytest.mark.parametrize("hooks", HOOKS, ids=lambda hooks: hooks.package)
def test_each_hook_is_there_and_explained(hooks: Hooks) -> None:
    module = importlib.import_module(".".join(["meshwright", *hooks.path.relative_to(PACKAGE).with_suffix("").parts]))
    for name, node in [*hooks.defined(), *hooks.imported()]:
        assert hasattr(module, name)
        said = any(hooks.explains(name, place) for place in [node, *hooks.users(name)])
        assert said, f"{hooks.package}/torch_hooks.py: say what {name} is for"
