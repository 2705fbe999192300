"""Runs every benchmark, keeps what it found in `results.json`, and writes the table of the README anew.

`python -m benchmarks.figures [NAME ...]` runs only those named; the others keep what was found before.
"""

from __future__ import annotations

import ast
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results.json"
ORDER = (
    *("opdb", "fuzz", "overhead", "reshard", "train", "guard", "all_reduce", "randomness", "products", "context"),
    *("aliases", "mutations", "optimizers", "escapes", "plans", "experts"),
    *("capture_paths", "static_equals_eager", "stale", "first_static_step", "one_program", "communications"),
    *("static_speed", "compile_scale"),
    *("rewrites", "rmsnorm", "llama_block"),
    *("closed_forms", "scheduler", "pipeline_gradients", "pipeline_overhead", "split_backward", "seed_pipeline"),
    *("collectives", "predict", "rank_plans", "memory", "plan_speed", "plan_models", "plan_quality"),
    *("code_lines", "mutation", "matrix_processes", "zero_memory", "checkpoint_faults", "versus_torch"),
    *("first_minutes", "cli", "report", "hostile", "faults", "soak"),
)
MARK = "<!-- figures -->"


def main(chosen: list[str]) -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures: dict[str, Any] = results.get("figures", {})
    for name in chosen or ORDER:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures[name] = measured(name)
        RESULTS.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    README.write_text(with_table(README.read_text(), figures))
    return 0 if all(figure["ok"] for figure in figures.values()) else 1


def measured(name: str) -> dict[str, Any]:
    """The benchmark's JSON object, from a process of its own; one that breaks is written down as broken."""
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks", name], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = finished.stdout.splitlines()
    today = datetime.now(UTC).date().isoformat()
    if not lines or not lines[-1].startswith("{"):
        found = {"name": name, "value": f"broke (exit code {finished.returncode})", "goal": "", "ok": False}
    else:
        found = json.loads(lines[-1])
    return {**found, "on": today, "cpu": machine()["cpu"]}


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": f"{len(models)} x {models[0]}" if models else platform.machine(),
    }


def with_table(text: str, figures: dict[str, Any]) -> str:
    """The text with everything between its two marks replaced by the table."""
    before, _, after = text.split(MARK)
    return f"{before}{MARK}\n{table(figures)}\n\n{processors(figures)}\n{MARK}{after}"


def table(figures: dict[str, Any]) -> str:
    """One row a figure.

    >>> figure = {"value": 1.0, "goal": "<= 1", "ok": True, "rival": {"name": "DTensor", "value": 1.65}}
    >>> print(table({"figure": figure}))
    | | measured | goal | rival | |
    |---|---|---|---|---|
    | `figure` | 1 | <= 1 | DTensor: 1.65 | yes |
    """
    rows = [
        f"| {title(name)} | {shown(figure['value'])} | {goal(figure)} | {rival(figure)} | {verdict(figure)} |"
        for name, figure in figures.items()
    ]
    return "\n".join(["| | measured | goal | rival | |", "|---|---|---|---|---|", *rows])


def processors(figures: dict[str, Any]) -> str:
    """What each figure was measured on, which decides more than we do.

    >>> print(processors({"a": {"cpu": "2 x X"}, "b": {"cpu": "2 x Y"}, "c": {"cpu": "2 x X"}}))
    * measured on 2 x X: `a`, `c`
    * measured on 2 x Y: `b`
    """
    names: dict[str, list[str]] = {}
    for name, figure in figures.items():
        names.setdefault(figure["cpu"], []).append(f"`{name}`")
    return "\n".join(f"* measured on {cpu}: {', '.join(found)}" for cpu, found in names.items())


def title(name: str) -> str:
    """The name, and the first line of the benchmark's docstring."""
    file = HERE / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    return f"`{name}`: {text.splitlines()[0].rstrip('.')}" if text else f"`{name}`"


def rival(figure: dict[str, Any]) -> str:
    found = figure.get("rival")
    if isinstance(found, dict) and set(found) == {"name", "value"}:
        return f"{found['name']}: {shown(found['value'])}"
    return "" if found is None else shown(found)


def goal(figure: dict[str, Any]) -> str:
    return "" if figure["goal"] is None else str(figure["goal"])


def verdict(figure: dict[str, Any]) -> str:
    return "yes" if figure["ok"] else "**no**"


def shown(value: object) -> str:
    """A value as a person writes it: four digits, named numbers one after the other.

    >>> shown({"even": 12345.678, "uneven": 0.000012345})
    'even 12346, uneven 1.234e-05'
    """
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
