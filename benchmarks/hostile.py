"""Malformed and malicious inputs for every reader: inputs that end in neither a result nor a clear error.

    python -m benchmarks hostile                        at least 5,000 inputs
    python -m benchmarks.hostile --reader strategy      one reader, with each input that goes wrong
    python -m benchmarks.hostile --reader plan --case 7

An input goes wrong if the reader raises an error that is not one of this library with its four parts, takes more than
10 seconds or 256 MB, writes or opens anything outside the folder of the input, starts a process or unpickles an object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._hostile_readers import readers
from benchmarks._hostile_run import Bad, run_reader

CASES, QUICK, LEAST = 260, 20, 5000
SHOWN = 40


def hostile(cases: int, seed: int, chosen: Iterable[str] = (), numbers: Sequence[int] = ()) -> dict[str, Any]:
    """Return how many inputs ran for each reader, and the failures."""
    counts, found = dict[str, int](), list[Bad]()
    with tempfile.TemporaryDirectory() as folder:
        every = readers(Path(folder))
        for reader in every:
            if chosen and reader.name not in chosen:
                continue
            wrong = list(run_reader(reader, seed, numbers or range(cases)))
            counts[reader.name] = len(numbers or range(cases))
            found += wrong
            print(f"{reader.name}: {len(wrong)} of {counts[reader.name]}", file=sys.stderr, flush=True)
    return {"inputs": counts, "bad": found}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure over all readers."""
    result = hostile(QUICK if quick else CASES, seed=0)
    bad: list[Bad] = result["bad"]
    inputs = sum(result["inputs"].values())
    by_reader = {name: Counter(b.how for b in bad if b.reader == name) for name in result["inputs"]}
    return {
        "name": "hostile",
        "value": len(bad),
        "goal": 0,
        "ok": not bad and inputs >= LEAST,
        "rival": None,
        "details": {
            "inputs": inputs,
            "readers": len(result["inputs"]),
            "by reader": {name: {"inputs": result["inputs"][name], **found} for name, found in by_reader.items()},
            "first": [_line(b) for b in bad[:SHOWN]],
        },
    }


def _line(bad: Bad) -> str:
    return f"{bad.reader} {bad.number} ({bad.change}): {bad.how} {bad.seen}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", action="append", default=[], help="name of a reader")
    parser.add_argument("--case", type=int, action="append", default=[], help="number of a case")
    parser.add_argument("--cases", type=int, default=CASES, help=f"cases of each reader ({CASES})")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for bad in hostile(args.cases, args.seed, args.reader, args.case)["bad"]:
        print(_line(bad))


if __name__ == "__main__":
    main()
