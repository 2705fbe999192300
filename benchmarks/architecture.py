"""Nodes of the syntax trees of `src/`, and the sizes of packages and subpackages.

Nodes are the measure of the amount of code, because formatting does not change them. `BEFORE` has the values at the
beginning of the work on the architecture.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
BEFORE = {"nodes": 611_866, "statements": 48_300, "lines": 76_459, "most modules": 76, "most lines": 11_393}
SHARE, MOST_MODULES, MOST_LINES = 0.9, 20, 3500


def run(quick: bool = False) -> dict[str, Any]:
    """Return the number of nodes; it takes a second, also without `quick`."""
    counts = counted()
    folders = {folder: sizes(folder) for folder in sorted({path.parent for path in SOURCE.rglob("*.py")})}
    now = counts | {
        "most modules": max(modules for modules, _ in folders.values()),
        "most lines": max(lines for _, lines in folders.values()),
    }
    goal = int(SHARE * BEFORE["nodes"])
    return {
        "name": "architecture",
        "value": counts["nodes"],
        "goal": f"at most {goal} nodes, {MOST_MODULES} modules and {MOST_LINES} lines in a package or subpackage",
        "ok": now["nodes"] <= goal and now["most modules"] <= MOST_MODULES and now["most lines"] <= MOST_LINES,
        "details": {
            "now": now,
            "before": BEFORE,
            "modules and lines": {path.relative_to(SOURCE).as_posix(): size for path, size in folders.items()},
        },
    }


def counted() -> dict[str, int]:
    """Return the numbers of nodes, statements and lines of the source."""
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    return {"nodes": len(nodes), "statements": statements, "lines": sum(len(text.splitlines()) for text in texts)}


def sizes(folder: Path) -> tuple[int, int]:
    """Return the numbers of modules and lines of a folder, without its `__init__` and its subpackages."""
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    return len(modules), sum(len(path.read_text().splitlines()) for path in modules)
