"""Laws of the project's English: how docstrings begin, and words that docstrings and pages do not use (LANGUAGE.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
QUESTIONS = re.compile(r"(What|How|Where|Who|Which|Those|Whether|When|Why)\b")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings: of the module, of classes and functions, and below attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for before, each in zip([None, *node.body], node.body, strict=False):
            text = each.value.value if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) else None
            if isinstance(text, str) and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield each.lineno, text


def test_no_docstring_opens_with_a_question_word() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        if QUESTIONS.match(text.strip())
    ]
    assert found == []


PRIVATE = re.compile(r"\b(house|houses|floors|door|doors|tells? of|told of|lies|lie)\b", re.IGNORECASE)
"""Metaphors that only this project would understand (LANGUAGE.md, rule 3)."""


def test_no_docstring_uses_a_private_metaphor() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {word[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        for word in PRIVATE.finditer(re.sub(r"`[^`]*`", "", text))
    ]
    assert found == []


def test_no_page_uses_a_private_metaphor() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = [
        f"{path.relative_to(ROOT)}: {word[0]}"
        for path in sorted(pages)
        for word in PRIVATE.finditer(re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL))
    ]
    assert found == []


def test_public_functions_that_raise_say_so() -> None:
    silent = [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}"
        for package in sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
        for path in sorted(package.rglob("*.py"))
        for function, text in public_functions(ast.parse(path.read_text()), exported_names(package))
        if raises(function) and "aise" not in text
    ]
    assert silent == []


def exported_names(package: Path) -> set[str]:
    """Return the names in `__all__` of a package."""
    tree = ast.parse((package / "__init__.py").read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
    ]
    return {each.value for value in lists for each in ast.walk(value) if isinstance(each, ast.Constant)}


def public_functions(tree: ast.Module, names: set[str]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield public functions and methods with their docstrings; constructors have that of their class, too."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node, ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef) and node.name in names:
            for method in node.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                text = ast.get_docstring(method) or ""
                if method.name in ("__init__", "__post_init__", "__call__"):
                    yield method, text + (ast.get_docstring(node) or "")
                elif not method.name.startswith("_"):
                    yield method, text


def raises(function: ast.FunctionDef) -> bool:
    """True if the function itself has a `raise` statement with an error; functions inside it do not count."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return False
