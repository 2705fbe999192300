"""Optimizers of torch with their options on distributed parameters: wrong results.

Each class of `torch.optim` makes steps with every implementation (foreach, fused, capturable, differentiable) and
every choice of its constructor, on parameters and gradients in various layouts. Parameters and states are compared on
every rank after every step, so that diverging replicas are found. If one device raises an error, the mesh must raise
the same error. `_optimizer_company` adds programs around an optimizer's step.

    python -m benchmarks.optimizers                    the figure
    python -m benchmarks.optimizers --class Adam       the failures of one class
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import OperationError

from . import _optimizer_company as company
from ._optimizer_cases import Layer, Setting, every
from ._samples import differ

RANKS, STEPS = 4, 3
BFLOAT16 = 100.0
"""Slack for Muon, which orthogonalises in bfloat16, where a different order of summation rounds differently."""
ONE_DEVICES_OWN = ("parse", "view size is not compatible")
"""Texts of errors that only one device raises, for sparse gradients and channels-last parameters."""


@dataclass(frozen=True)
class Failure:
    """A case that was not right."""

    optimizer: str
    options: str
    setting: str
    status: str  # "wrong" or "raised"
    message: str


Seen = list[list[Tensor]]
"""For each step, the parameters and the tensors of their states after it."""


def steps(kind: Any, options: dict[str, Any], setting: Setting, mesh: Any) -> Seen:
    """Return the parameters and the optimizer's states after each step."""
    layer = Layer(mesh)
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    if options.get("differentiable"):
        return company.differentiated(kind, options, setting, layer)
    params = setting.make(layer)
    optimizer = kind(params, **options)
    seen: Seen = []
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            return setting.grade(layer, params, step)

        if kind is torch.optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        seen.append([whole_copy(x) for x in (*params, *states_of(optimizer, params))])
    return seen


def states_of(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors among the states, in the order of parameters and names."""
    states = [optimizer.state.get(p, {}) for p in params]
    return [x for state in states for _, x in sorted(state.items()) if isinstance(x, Tensor)]


def whole_copy(x: Tensor) -> Tensor:
    """Return a copy of the whole value on this rank, in single precision for the comparison."""
    x = mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x
    return x.detach().to(torch.float32 if x.is_floating_point() else x.dtype, copy=True)


@dataclass(frozen=True)
class Outcome:
    """The results of the steps, or the error that ended them."""

    seen: Seen | None
    error: BaseException | None

    @staticmethod
    def of(kind: Any, options: dict[str, Any], setting: Setting, mesh: Any) -> Outcome:
        try:
            return Outcome(steps(kind, options, setting, mesh), None)
        except Exception as error:
            return Outcome(None, error)


def compared(kind: type, found: Outcome, wanted: Outcome, slack: float = 1.0) -> tuple[str, str] | None:
    """Return status and message of a case that is not right, else None; SparseAdam may raise OperationError."""
    if wanted.seen is None:
        if any(words in str(wanted.error) for words in ONE_DEVICES_OWN):
            return None
        return None if _same_error(found.error, wanted.error) else ("wrong", _disagreement(found, wanted))
    if found.seen is None:
        refused = kind is torch.optim.SparseAdam and isinstance(found.error, OperationError)
        return None if refused else ("raised", _words(found.error))
    for step, (mine, one) in enumerate(zip(found.seen, wanted.seen, strict=True)):
        message = differ(mine, one, slack)
        if message is not None:
            return "wrong", f"step {step}: {message}"
    return None


def _same_error(found: BaseException | None, wanted: BaseException | None) -> bool:
    if found is None or wanted is None:
        return False
    return isinstance(found, type(wanted)) and str(wanted).split("\n")[0][:60] in str(found)


def _disagreement(found: Outcome, wanted: Outcome) -> str:
    mine = "gives numbers" if found.error is None else f"raises {_words(found.error)}"
    return f"one device raises {_words(wanted.error)}; this {mine}"


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def failures_of(kind: Any, options: dict[str, Any], settings: Sequence[Setting]) -> list[Failure]:
    """Return the failures of the optimizer over the settings."""
    wanted = [Outcome.of(kind, options, setting, None) for setting in settings]
    text = ", ".join(f"{k}={v}" for k, v in options.items())
    try:
        ranks = mw.simulate(lambda: [Outcome.of(kind, options, s, s.mesh) for s in settings], RANKS)
    except Exception as error:
        if len(settings) == 1:
            return [Failure(kind.__name__, text, settings[0].name, "raised", f"the ranks parted: {_words(error)}")]
        return [f for setting in settings for f in failures_of(kind, options, [setting])]
    failures: list[Failure] = []
    slack = BFLOAT16 if kind.__name__ == "Muon" else 1.0
    for at, setting in enumerate(settings):
        bad = [b for rank in ranks if (b := compared(kind, rank[at], wanted[at], slack)) is not None]
        if bad:
            status, message = min(bad, key=lambda b: b[0] != "wrong")
            failures.append(Failure(kind.__name__, text, setting.name, status, message))
    return failures


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of cases that are wrong or raise an error."""
    torch.set_num_threads(1)
    start, cases, failures = time.perf_counter(), 0, list[Failure]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, options, settings in every(quick):
            cases += len(settings)
            failures += failures_of(kind, options, settings)
        for name, message in company.failures():
            failures.append(Failure(name, "", "", "wrong", message))
    counts = Counter(f.status for f in failures)
    cases += len(company.PROGRAMS)
    return {
        "name": "optimizers",
        "value": len(failures),
        "goal": 0,
        "ok": not failures,
        "rival": None,
        "details": {
            "cases": cases,
            "wrong": counts["wrong"],
            "raised": counts["raised"],
            "failures": [vars(f) for f in failures[:40]],
            "seconds": round(time.perf_counter() - start),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one in a few cases")
    parser.add_argument("--class", dest="only", help="one class of torch.optim, every failure printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only is None:
        print(json.dumps(run(args.quick)))
        return
    warnings.simplefilter("ignore")
    count = 0
    for kind, options, settings in every(args.quick):
        if args.only in (kind.__name__, "all"):
            count += len(settings)
            for failure in failures_of(kind, options, settings):
                print(failure, flush=True)
    print(count, "cases")


if __name__ == "__main__":
    main()
