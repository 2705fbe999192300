"""Decisions per line of `src/`, comments that stop the formatter, annotations with `Any`, and the hardest function."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
BEFORE = {"decisions a line": 0.317, "formatter stopped": 473, "Any": 0.1209, "too complex": 138}
"""Values of 1d175a65, counted in the same way. Another way of counting had given 0.51 decisions a line before."""
MOST_DECISIONS, MOST_STOPPED, MOST_ANY, MOST_COMPLEX = 0.35, 40, 0.04, 10
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case, ast.Assert)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the decisions per line of code; it takes a few seconds, also without `quick`."""
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = sum(lines_of_code(text) for text in texts.values())
    now = {
        "decisions a line": round(sum(map(decisions, trees.values())) / lines, 3),
        "formatter stopped": sum(text.count("# fmt:") for text in texts.values()),
        "Any": round(share_of_any(trees.values()), 4),
    }
    ranked = sorted(functions(trees), reverse=True)
    complex_ones = [f"{name} {number}" for number, name in ranked if number > MOST_COMPLEX]
    return {
        "name": "density",
        "value": now["decisions a line"],
        "goal": f"at most {MOST_DECISIONS} decisions a line, {MOST_STOPPED} tables that the formatter leaves alone, "
        f"{MOST_ANY:.0%} of annotations with Any, complexity {MOST_COMPLEX}",
        "ok": now["decisions a line"] <= MOST_DECISIONS
        and now["formatter stopped"] < MOST_STOPPED
        and now["Any"] < MOST_ANY
        and not complex_ones,
        "details": {"now": now | {"lines of code": lines}, "before": BEFORE, "too complex": complex_ones},
    }


def lines_of_code(text: str) -> int:
    """Return the number of lines with code, without blank lines, comments and docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(docstring_lines(ast.parse(text))))


def docstring_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of all docstrings of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def decisions(tree: ast.AST) -> int:
    """Return the number of branches below a node.

    Branches and loops count once, so does each clause and each condition of a comprehension, and each operand of `and`
    and `or` but the first.
    """
    return sum(map(decisions_at, ast.walk(tree)))


def decisions_at(node: ast.AST) -> int:
    """Return the number of decisions of one node, without those below it."""
    match node:
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case _:
            return int(isinstance(node, BRANCHES))


def functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[int, str]]:
    """Yield the complexity and the place of each function, its inner functions counted on their own."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield complexity(node), f"{path.relative_to(SOURCE)}:{node.name}"


def complexity(function: ast.AST) -> int:
    """Return McCabe's number plus comprehensions and conditional expressions; `and` and `or` do not count."""
    return 1 + sum(decisions_at(node) for node in own_nodes(function) if not isinstance(node, ast.BoolOp))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function that are not part of a function inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from own_nodes(child)


def share_of_any(trees: Iterable[ast.AST]) -> float:
    """Return the share of annotations that are the bare name `Any`."""
    found = [annotation for tree in trees for annotation in annotated(tree)]
    return sum(isinstance(each, ast.Name) and each.id == "Any" for each in found) / len(found)


def annotated(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the annotations of arguments, results and names of a module."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
