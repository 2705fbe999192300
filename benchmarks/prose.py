"""Laws of the project's English: openings of docstrings and messages, metaphors, long sentences, documented errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
QUESTIONS = re.compile(r"(What|How|Where|Who|Which|Those|Whether|When|Why)\b")
PRIVATE = re.compile(r"\b(house|houses|floors|door|doors|tells? of|told of|lies|lie)\b", re.IGNORECASE)
"""Metaphors that only this project would understand (LANGUAGE.md, rule 3)."""
MOST_WORDS, MOST_LONG = 35, 0.02
"""Maximum words of a sentence that is not long, and maximum share of long sentences."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the share of long sentences in the pages; it takes a few seconds, also without `quick`."""
    sentences = [(page, sentence) for page in pages() for sentence in sentences_of(page.read_text())]
    long = [f"{page.relative_to(ROOT)}: {sentence}" for page, sentence in sentences if words(sentence) > MOST_WORDS]
    offences = {
        "docstrings that open with a question word": questions_in_docstrings(),
        "messages that open with a question word": questions_in_messages(),
        "private metaphors in docstrings": metaphors_in_docstrings(),
        "private metaphors in pages": metaphors_in_pages(),
        "public functions that raise and do not say so": silent_raisers(),
    }
    share = len(long) / len(sentences)
    return {
        "name": "prose",
        "value": round(share, 4),
        "goal": f"at most {MOST_LONG:.0%} of the sentences in pages have more than {MOST_WORDS} words; no offence",
        "ok": share <= MOST_LONG and not any(offences.values()),
        "details": {"sentences": len(sentences), "long": long, **offences},
    }


def pages() -> list[Path]:
    """Return the pages of the documentation, and those beside the README."""
    return sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def sentences_of(page: str) -> Iterator[str]:
    """Yield the sentences of a page; code, tables, headings and HTML are left out."""
    text = re.sub(r"^---\n.*?\n---\n|```.*?```", "", page, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)", text):
        if not block.strip().startswith(("|", "<", "#")):
            plain = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", block))
            yield from re.split(r"(?<=[.!?:;])\)?\s+(?=\W*[A-Z])", " ".join(plain.split()))


def words(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return len(re.findall(r"[\w'’-]+", sentence))


def questions_in_docstrings() -> list[str]:
    """Return the docstrings that open with a question word."""
    return [f"{place}: {text.splitlines()[0]}" for place, text in all_docstrings() if QUESTIONS.match(text.strip())]


def questions_in_messages() -> list[str]:
    """Return the texts of raised errors and of warnings that open with a question word."""
    return [
        f"{path.relative_to(SOURCE)}:{call.lineno}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn_user"))
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        for text in openings(call.args)
        if QUESTIONS.match(text)
    ]


def is_warning(node: ast.AST) -> bool:
    """True for a call that warns."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn_user")


def openings(arguments: list[ast.expr]) -> Iterator[str]:
    """Yield the texts with which arguments begin, formatted ones included."""
    for argument in arguments:
        first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def metaphors_in_docstrings() -> list[str]:
    """Return the private metaphors in docstrings."""
    return [
        f"{place}: {word[0]}"
        for place, text in all_docstrings()
        for word in PRIVATE.finditer(re.sub(r"`[^`]*`", "", text))
    ]


def metaphors_in_pages() -> list[str]:
    """Return the private metaphors in pages."""
    return [
        f"{page.relative_to(ROOT)}: {word[0]}"
        for page in pages()
        for word in PRIVATE.finditer(re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL))
    ]


def silent_raisers() -> list[str]:
    """Return the public functions that raise an error and do not document it."""
    return [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}"
        for package in sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
        for path in sorted(package.rglob("*.py"))
        for function, text in public_functions(ast.parse(path.read_text()), exported_names(package))
        if raises(function) and "aise" not in text
    ]


def all_docstrings() -> Iterator[tuple[str, str]]:
    """Yield place and text of every docstring of the source."""
    for path in sorted(SOURCE.rglob("*.py")):
        for line, text in docstrings(ast.parse(path.read_text())):
            yield f"{path.relative_to(SOURCE)}:{line}", text


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings: of the module, of classes and functions, and below attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for before, each in zip([None, *node.body], node.body, strict=False):
            text = each.value.value if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) else None
            if isinstance(text, str) and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield each.lineno, text


def exported_names(package: Path) -> set[str]:
    """Return the names in `__all__` of a package."""
    tree = ast.parse((package / "__init__.py").read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
    ]
    return {str(each.value) for value in lists for each in ast.walk(value) if isinstance(each, ast.Constant)}


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
