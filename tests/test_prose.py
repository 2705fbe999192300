"""Docstrings begin with what a function does or what an object is, never with a question word (LANGUAGE.md, rule 5)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
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
