"""Lines of code that make a Llama parallel: its marks and its plan.

The lines of `examples/llama_parallel.py` (2 stages × 2 × 2, with ZeRO) that the script for one device does not have;
comments, blank lines and docstrings are not counted. The script for one device runs on four ranks as it is, by
`meshwright run --auto`. All print the same losses.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

GOAL, LOSS_GOAL = 15, 1e-4
EXAMPLES = Path(__file__).parents[1] / "examples"
ONE, PARALLEL = (EXAMPLES / f"llama_{name}.py" for name in ("one_device", "parallel"))
PUBLISHED = {"by hand": 1275, "Paddle's marks": 44}


def code(path: Path) -> list[str]:
    """Return the lines of code, without blank lines, comments and docstrings."""
    text = path.read_text()
    body = ast.parse(text).body
    start = body[0].end_lineno or 0 if isinstance(body[0], ast.Expr) else 0
    lines = (line.strip() for line in text.splitlines()[start:])
    return [line for line in lines if line and not line.startswith("#")]


def added(path: Path) -> list[str]:
    """Return the lines that the script for one device does not have."""
    return [line[2:] for line in difflib.ndiff(code(ONE), code(path)) if line.startswith("+ ")]


def losses(script: Path, ranks: int, *options: str) -> list[float]:
    """Return the printed losses of all ranks, step by step."""
    words = ["-m", "meshwright", "run", "--all-ranks", "--ranks", str(ranks), *options] if ranks > 1 else []
    found = subprocess.run([sys.executable, *words, str(script)], stdout=subprocess.PIPE, text=True, check=True)
    return [float(n) for n in re.findall(r"^(?:\[\d+\] )?loss ([\d.]+)$", found.stdout, re.MULTILINE)]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of added lines, and the difference of the losses."""
    expected = losses(ONE, 1)
    apart = {
        "parallel": _apart(losses(PARALLEL, 8), expected * 8),
        "auto": _apart(losses(ONE, 4, "--auto"), expected * 4),
    }
    count = len(added(PARALLEL))
    return {
        "name": "code_lines",
        "value": count,
        "goal": f"at most {GOAL} for dp × tp × pp × ZeRO; 0 with auto",
        "ok": count <= GOAL and max(apart.values()) <= LOSS_GOAL,
        "rival": {"name": "published", **PUBLISHED},
        "details": {"added": added(PARALLEL), "added with auto": 0, "losses apart": apart},
    }


def _apart(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; ranks print the same numbers, in any order."""
    return max(abs(a - b) / b for a, b in zip(sorted(found), sorted(expected), strict=True))
