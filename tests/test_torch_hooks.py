"""Each private name of torch that a room leans on sits in its `torch_hooks.py`, explained and still there.

A new torch release that moves one of them fails here, by name, before anything else.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
HOOKS = sorted(PACKAGE.rglob("torch_hooks.py"))


def names(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) of each public name that the module gives."""
    for node in tree.body:
        yield from ((name, node) for name in bound(node) if not name.startswith("_"))


def bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        return [alias.asname or alias.name for alias in node.names]
    return []


def is_explained(node: ast.stmt, text: str, tree: ast.Module) -> bool:
    """A docstring, a string below it, or a comment beside or above it says what the name is for."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
        return True
    follower = tree.body[tree.body.index(node) + 1 :][:1]
    if any(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in follower):
        return True
    lines = text.splitlines()
    own = lines[node.lineno - 1 : node.end_lineno]
    above = lines[node.lineno - 2] if node.lineno > 1 else ""
    return above.lstrip().startswith("#") or any("#" in line for line in own)


CASES = [
    pytest.param(path, name, node, id=f"{path.parent.name}.{name}")
    for path in HOOKS
    for name, node in names(ast.parse(path.read_text()))
]


@pytest.mark.parametrize(("path", "name", "node"), CASES)
def test_a_hook_is_there_and_explained(path: Path, name: str, node: ast.stmt) -> None:
    module = importlib.import_module(".".join(["meshwright", *path.relative_to(PACKAGE).with_suffix("").parts]))
    assert hasattr(module, name)
    text = path.read_text()
    tree = ast.parse(text)
    same = next(n for n in tree.body if n.lineno == node.lineno)
    assert is_explained(same, text, tree), f"{path.parent.name}/torch_hooks.py: say what {name} is for"
