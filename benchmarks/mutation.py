"""Share of sampled mutants that the tests of the mutated package kill.

    python -m benchmarks.mutation                                the sample of 300
    python -m benchmarks.mutation --package reshard --count 60   60 mutants of one package
    python -m benchmarks.mutation --package reshard --survivors  the stored survivors again, with their diffs

mutmut makes the mutants, and a seed samples them; `_mutants` lists those that are left out. Each mutant runs only the
tests in `tests/PACKAGE`, in a copy of the source under `out/mutation`, up to the first failing test (`_mutant_runs`). A
timeout counts as a failure. `out/mutation/results.json` stores the results, so a stopped run can continue. A result is
valid while sources and tests are unchanged. Otherwise the mutant runs again, first on the test that killed it.

`equivalent_mutants.toml` gives the reason why a surviving mutant is equivalent. Equivalent mutants still count as
survivors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._mutant_runs import Outcome, Runner, Tree
from benchmarks._mutants import Mutant, sample

PACKAGES = ("layout", "spmd", "reshard", "tensor", "comm", "passes", "pipeline")
FULL, QUICK = 300, 20
GOAL = 0.9
SEED = 0
ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "mutation"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")


class Kept:
    """Results of earlier runs, in a file: the verdict on each mutant, and the state of the source at that time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def verdict(self, mutant: Mutant, state: str) -> dict[str, Any] | None:
        """Return the result on the same sources and tests, or None."""
        found = self.results.get(mutant.key)
        return found if found is not None and found["state"] == state else None

    def likely_killers(self, mutant: Mutant) -> list[str]:
        """Return the test that killed this mutant before, then the most frequent killers of mutants in its file."""
        own = self.results.get(mutant.key, {}).get("killer")
        near = Counter(r["killer"] for r in self.results.values() if r["file"] == mutant.file and r["killer"])
        return [test for test in dict.fromkeys([own, *(test for test, _ in near.most_common())]) if test]

    def keep(self, mutant: Mutant, result: dict[str, Any]) -> None:
        """Add a result to the file, and keep the results that other processes added."""
        self.results = self._read() | {mutant.key: {"file": mutant.file, **result}}
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self.results, indent=1))
        temporary.replace(self.path)


def state_of(package: str) -> str:
    """Return a hash of all sources and of the package's tests."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / package).rglob("*.py"), ROOT / "tests" / "conftest.py"]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def measure(mutants: Sequence[Mutant], progress: bool = False) -> dict[str, dict[str, Any]]:
    """Return the verdict on every mutant by its key; stored verdicts are not measured again."""
    OUT.mkdir(parents=True, exist_ok=True)
    kept, states = Kept(OUT / "results.json"), {package: state_of(package) for package in PACKAGES}
    with _Runs() as runs:
        return {m.key: _verdict(m, kept, states[package_of(m)], runs, progress) for m in sorted(mutants, key=_order)}


def _order(mutant: Mutant) -> tuple[int, str, str]:
    return PACKAGES.index(package_of(mutant)), mutant.file, mutant.key


class _Runs:
    """A runner with its own directory, made when it is first needed."""

    def __init__(self) -> None:
        self._runner: Runner | None = None

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *error: object) -> None:
        if self._runner is not None:
            self._runner.tree.close()

    def on(self, mutant: Mutant, first: Sequence[str]) -> Outcome:
        """Run the tests of the mutant's package, the tests in `first` before the others."""
        if self._runner is None:
            self._runner = Runner(Tree(ROOT, OUT / str(os.getpid()) / "tree"))
        self._runner.prepare(package_of(mutant))
        return self._runner.run(package_of(mutant), mutant, first)


def _verdict(mutant: Mutant, kept: Kept, state: str, runs: _Runs, progress: bool) -> dict[str, Any]:
    found = kept.verdict(mutant, state)
    if found is None:
        outcome = runs.on(mutant, kept.likely_killers(mutant))
        found = {"killer": outcome.killer, "seconds": outcome.seconds, "state": state}
        kept.keep(mutant, found)
    if progress:
        word, killer = ("survived", "") if found["killer"] is None else ("killed  ", found["killer"])
        print(f"{word} {found['seconds']:6.1f} s  {mutant.file}:{mutant.line}  {killer}", file=sys.stderr, flush=True)
    return found


def package_of(mutant: Mutant) -> str:
    return mutant.file.split("/")[2]


def reasons() -> dict[tuple[str, str, str], str]:
    """Return the reasons why mutants are equivalent, by file, source lines and mutated lines."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {(e["file"], e["line"].strip(), e["becomes"].strip()): " ".join(e["why"].split()) for e in entries}


def survivors(mutants: Sequence[Mutant], verdicts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mutants that no test noticed, with the reason why a mutant is equivalent, if there is one."""
    why = reasons()
    return [
        {"at": f"{m.file}:{m.line}", "diff": m.diff, "equivalent": why.get((m.file, m.before, m.after))}
        for m in sorted(mutants, key=lambda m: (m.file, m.line))
        if verdicts[m.key]["killer"] is None
    ]


def figure(mutants: Sequence[Mutant], verdicts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figure: the share of mutants that was killed."""
    killed = {m.key for m in mutants if verdicts[m.key]["killer"] is not None}
    left = survivors(mutants, verdicts)
    tried = Counter(map(package_of, mutants))
    caught = Counter(package_of(m) for m in mutants if m.key in killed)
    value = len(killed) / len(mutants)
    return {
        "name": "mutation",
        "value": round(value, 3),
        "goal": f">= {GOAL} of {FULL} mutants killed",
        "ok": value >= GOAL,
        "rival": None,
        "details": {
            "mutants": len(mutants),
            "killed": len(killed),
            "per_package": {p: {"killed": caught[p], "survived": tried[p] - caught[p]} for p in PACKAGES},
            "equivalent": sum(entry["equivalent"] is not None for entry in left),
            "survivors": left,
            "seconds": round(sum(verdicts[m.key]["seconds"] for m in mutants)),
        },
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure over all packages."""
    mutants = sample(ROOT, PACKAGES, QUICK if quick else FULL, SEED)
    return figure(mutants, measure(mutants, progress=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=PACKAGES, action="append", help="mutate only this package")
    parser.add_argument("--count", type=int, default=FULL, help="number of mutants")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--survivors", action="store_true", help="run only mutants that survived before")
    args = parser.parse_args()
    mutants = sample(ROOT, args.package or PACKAGES, args.count, args.seed)
    if args.survivors:
        kept = Kept(OUT / "results.json").results
        mutants = [m for m in mutants if kept.get(m.key, {}).get("killer", "") is None]
    found = figure(mutants, measure(mutants, progress=True))
    for entry in found["details"].pop("survivors"):
        print(f"{entry['at']}  {entry['equivalent'] or ''}\n{entry['diff']}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
