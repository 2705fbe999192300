"""Measure all figures, store them in `results.json`, and write the tables of `docs/figures.md` and of the README.

`python -m benchmarks.figures [NAME ...]` measures only the named figures and keeps the stored results of the others.
`python -m benchmarks.figures --tables` measures nothing: it writes both tables from the stored results.
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

from . import platforms

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
PAGE = HERE.parent / "docs" / "figures.md"
RESULTS = HERE / "results.json"
ORDER = (
    *("opdb", "fuzz", "overhead", "reshard", "train", "guard", "all_reduce", "randomness", "products"),
    *("context", "attention_memory"),
    *("aliases", "mutations", "optimizers", "escapes", "plans", "experts"),
    *("generate", "generate_speed", "rlhf", "same_numbers"),
    *("capture_paths", "static_equals_eager", "stale", "first_static_step", "one_program", "communications"),
    *("static_speed", "same_transport", "collectives_per_step", "replayable", "compile_scale"),
    *("rewrites", "rmsnorm", "llama_block"),
    *("closed_forms", "scheduler", "pipeline_gradients", "pipeline_overhead", "split_backward", "seed_pipeline"),
    *("races", "overlap", "conformance", "gpu"),
    *("collectives", "predict", "rank_plans", "memory", "plan_speed", "plan_models", "plan_quality"),
    *("plan_cases", "laws"),
    *("code_lines", "mutation", "matrix_processes", "zero_memory", "checkpoint_faults", "versus_torch"),
    *("quantize_exact", "quantize_quality", "quantize_interop", "quantize_generate", "quantize_speed"),
    *("low_precision", "weight_sync"),
    *("sixty_seconds", "startup", "docs", "cli", "report", "hostile", "faults", "soak"),
    *("architecture", "density", "prose", "test_time"),
)
SHOWN = (
    *("opdb", "static_equals_eager", "train", "code_lines"),
    *("overhead", "versus_torch", "predict", "compile_scale"),
)
"""The figures in the README: correctness first, then the amount of code, speed and prediction."""
MARK = "<!-- figures -->"


def main(chosen: list[str]) -> int:
    figures = stored()
    for name in () if chosen == ["--tables"] else chosen or ORDER:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures[name] = measured(name)
        RESULTS.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    for path, text in pages(figures).items():
        path.write_text(text)
    return 0 if all(figure["ok"] for figure in figures.values()) else 1


def stored() -> dict[str, Any]:
    """Return the results that were measured last, by name."""
    return json.loads(RESULTS.read_text())["figures"] if RESULTS.exists() else {}


def pages(figures: dict[str, Any]) -> dict[Path, str]:
    """Return the text of the pages with a table: all figures, those of `SHOWN`, and the results by platform."""
    shown_figures = {name: figures[name] for name in SHOWN if name in figures}
    return {
        PAGE: with_table(PAGE.read_text(), figures),
        README: with_table(README.read_text(), shown_figures),
        platforms.PAGE: platforms.page(figures),
    }


def measured(name: str) -> dict[str, Any]:
    """Return the JSON object of a benchmark, run in its own process; a benchmark that fails is recorded as broken."""
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
    """Return the machine and the versions that the figures were measured with."""
    info = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": f"{len(models)} x {models[0]}" if models else platform.machine(),
    }


def with_table(text: str, figures: dict[str, Any]) -> str:
    """Return the text with everything between its two marks replaced by the table."""
    before, _, after = text.split(MARK)
    return f"{before}{MARK}\n{table(figures)}\n\n{processors(figures)}\n{MARK}{after}"


def table(figures: dict[str, Any]) -> str:
    """Return the table, one row a figure.

    >>> figure = {"value": 1.0, "goal": "<= 1", "ok": True, "rival": {"name": "DTensor", "value": 1.65}}
    >>> print(table({"figure": figure}))
    | figure | measured | goal | rival | met |
    |---|---|---|---|---|
    | `figure` | 1 | <= 1 | DTensor: 1.65 | yes |
    """
    rows = [
        f"| {title(name)} | {shown(figure['value'])} | {goal(figure)} | {rival(figure)} | {verdict(figure)} |"
        for name, figure in figures.items()
    ]
    return "\n".join(["| figure | measured | goal | rival | met |", "|---|---|---|---|---|", *rows])


def processors(figures: dict[str, Any]) -> str:
    """Return a list of processors and the figures that were measured on each.

    >>> print(processors({"a": {"cpu": "2 x X"}, "b": {"cpu": "2 x Y"}, "c": {"cpu": "2 x X"}}))
    * measured on 2 x X: `a`, `c`
    * measured on 2 x Y: `b`
    """
    names: dict[str, list[str]] = {}
    for name, figure in figures.items():
        names.setdefault(figure["cpu"], []).append(f"`{name}`")
    return "\n".join(f"* measured on {cpu}: {', '.join(found)}" for cpu, found in names.items())


def title(name: str) -> str:
    """Return the name and the first line of the docstring of the benchmark."""
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
    """Return a value with four digits; named numbers follow each other.

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
