"""Print a benchmark's result as one JSON object: `python -m benchmarks NAME [--quick]`; without NAME, all names."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

NOT_BENCHMARKS = {"__init__", "__main__", "figures"}
KEYS = ("name", "value", "goal", "ok")


def names() -> list[str]:
    """Return the names of all benchmarks: the modules of this folder whose names do not start with `_`."""
    files = Path(__file__).parent.glob("[!_]*.py")
    return sorted({path.stem for path in files} - NOT_BENCHMARKS)


def measure(name: str, quick: bool = False) -> dict[str, Any]:
    """Return the result of the benchmark; KeyError if it lacks a key that all benchmarks share."""
    found = {"name": name, **importlib.import_module(f"benchmarks.{name}").run(quick=quick)}
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise KeyError(f"benchmarks.{name}.run gave no {', '.join(missing)}; it must give {', '.join(KEYS[1:])}")
    return found


def main() -> int:
    """Return 0 if the goal is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure one of the project's figures.")
    parser.add_argument("name", nargs="?", choices=names())
    parser.add_argument("--quick", action="store_true", help="fewer cases, for a first look")
    settings = parser.parse_args()
    if settings.name is None:
        print("\n".join(names()))
        return 0
    found = measure(settings.name, settings.quick)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
