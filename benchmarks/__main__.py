"""`python -m benchmarks NAME [--quick]` prints one JSON object; without a name, the names."""

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
    """Every module of this folder that is a benchmark; one that starts with `_` belongs to another."""
    files = Path(__file__).parent.glob("[!_]*.py")
    return sorted({path.stem for path in files} - NOT_BENCHMARKS)


def measure(name: str, quick: bool = False) -> dict[str, Any]:
    """What the benchmark found, under the keys that all of them share."""
    found = {"name": name, **importlib.import_module(f"benchmarks.{name}").run(quick=quick)}
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise KeyError(f"benchmarks.{name}.run gave no {', '.join(missing)}; it must give {', '.join(KEYS[1:])}")
    return found


def main() -> int:
    """0 when the goal is reached, 1 when not."""
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
