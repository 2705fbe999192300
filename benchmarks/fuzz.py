"""Random programs in random layouts on meshes of one, two and three axes: wrong results.

    python -m benchmarks.fuzz                          10,000 programs
    python -m benchmarks.fuzz --seed 500 --chains 100  programs 500 to 599
    python -m benchmarks.fuzz --only 512               one program: printed, run, and reduced if it fails

The programs are those of `_chains`. Values and gradients of every program must equal those of a single device.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import _chains, _samples
from benchmarks._chains import Chain, Machine, Outcome
from benchmarks.opdb import Ours

FULL, QUICK = 10_000, 300


@dataclass(frozen=True)
class Failure:
    """A program whose numbers differ from those of a single device."""

    chain: Chain
    message: str


def machine(library: Ours, mesh: tuple[int, ...]) -> Machine:
    """Return the meaning of the program's names on simulated ranks."""

    def lay(value: torch.Tensor, layout: str, seed: int) -> Any:
        whole = value.detach()
        return library.place(value, mesh, tuple(layout.split()), lambda n: _samples.exact_terms(whole, n, seed))

    return Machine(lay, lambda x, layout: library.reshard(x, mesh, tuple(layout.split())))


def check(library: Ours, chain: Chain) -> Failure | None:
    """Return None if every rank's values and gradients are those of a single device, else the failure."""
    try:
        with _chains.kernels(chain):
            wanted = _chains.perform(chain, Machine())
            messages = library.mw.simulate(lambda: _on_rank(library, chain, wanted), math.prod(chain.mesh))
    except Exception as error:
        return Failure(chain, " ".join(f"{type(error).__name__}: {error}".split())[:400])
    message = next((m for m in messages if m), None)
    return Failure(chain, message) if message else None


def _on_rank(library: Ours, chain: Chain, wanted: Outcome) -> str | None:
    found = _chains.perform(chain, machine(library, chain.mesh))
    for name, value in wanted.values.items():
        if message := _samples.differ(library.whole(found.values[name]), value):
            return f"{name}: {message}"
    for k, (a, b) in enumerate(zip(found.grads, wanted.grads, strict=True)):
        if message := _differ_grad(library.whole(a), b):
            return f"gradient of leaf {k}: {message}"
    return None


def _differ_grad(found: torch.Tensor | None, wanted: torch.Tensor | None) -> str | None:
    """Return the difference of two gradients, or None; a gradient of zeros equals None."""
    if found is None or wanted is None:
        some = found if wanted is None else wanted
        return None if some is None or not some.count_nonzero() else "missing" if found is None else "not wanted"
    return _samples.differ(found, wanted, slack=10.0)


def cut_down(library: Ours, failure: Failure) -> Failure:
    """Return the failure of the smallest failing program; a wrong number stays a wrong number."""
    raised = "Error" in failure.message.split(":")[0]

    def fails(chain: Chain) -> bool:
        found = check(library, chain)
        return found is not None and ("Error" in found.message.split(":")[0]) == raised

    small = _chains.shrink(failure.chain, fails)
    return check(library, small) or failure


def fuzz(seed: int, chains: int, library: Ours | None = None, progress: bool = False) -> list[Failure]:
    """Return the failures among programs `seed` to `seed + chains - 1`."""
    library = library or Ours()
    failures: list[Failure] = []
    for k in range(seed, seed + chains):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            failure = check(library, _chains.draw(k))
        if failure:
            failures.append(failure)
            if progress:
                print(f"# {failure.message}\n{failure.chain}\n", flush=True)
    return failures


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of programs that fail."""
    torch.set_num_threads(1)
    start, chains = time.perf_counter(), QUICK if quick else FULL
    library = Ours()
    failures = fuzz(0, chains, library)
    shown = [cut_down(library, f) for f in failures[:10]]
    return {
        "name": "fuzz",
        "value": len(failures),
        "goal": 0,
        "ok": not failures,
        "rival": None,
        "details": {
            "chains": chains,
            "entries_in_table": len(_chains.OPS),
            "failing_seeds": [f.chain.seed for f in failures],
            "shrunk": [{"message": f.message, "program": str(f.chain)} for f in shown],
            "seconds": round(time.perf_counter() - start),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} programs")
    parser.add_argument("--seed", type=int, help="the first program")
    parser.add_argument("--chains", type=int, default=FULL)
    parser.add_argument("--only", type=int, help="print and run one program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.only is not None:
        _show(args.only)
    elif args.seed is not None:
        failures = fuzz(args.seed, args.chains, progress=True)
        print(json.dumps({"chains": args.chains, "failures": [f.chain.seed for f in failures]}))
    else:
        print(json.dumps(run(args.quick)))


def _show(seed: int) -> None:
    library, chain = Ours(), _chains.draw(seed)
    print(chain)
    failure = check(library, chain)
    if failure is None:
        print("# right")
        return
    print(f"# {failure.message}\n")
    small = cut_down(library, failure)
    print(f"{small.chain}\n# {small.message}")


if __name__ == "__main__":
    main()
