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
