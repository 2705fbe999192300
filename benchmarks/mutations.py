"""Operators of torch that write to an argument, on distributed tensors: wrong results.

Every overload of `torch.ops.aten` whose schema marks an argument as written is called on four simulated ranks, as the
operator and as torch's public function or method, under every layout of `LAYOUTS`. Results, written arguments and
gradients are compared with one device on every rank. A call that raises an error of this library counts as refused, or
as wrong if it changed an argument.

    python -m benchmarks.mutations                          the figure
    python -m benchmarks.mutations --op _foreach_add_       the failures of some operators
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import meshwright as mw
from meshwright.layout import MeshwrightError

from . import _samples
from ._mutating_samples import Call, called, calls_of, is_written, mutating_operators, record
from .opdb import Ours

Marks = tuple[str, ...]
RANKS = 4
_NN: Any = vars(torch._C)["_nn"]
UNADDED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch cannot add, so that they cannot be pending sums."""
QUICK = 12  # the quick figure takes one of this many operators


@dataclass(frozen=True)
class Layout:
    """Layouts for the tensors of a call: a mesh, and one mark per axis for written tensors and for the others.

    `0` and `-1` shard the first and the last dim, `R` replicates, `P` is a pending sum, and `plain` leaves the tensor
    plain. The other tensors take the entries of `others` in turn.
    """

    name: str
    mesh: tuple[int, ...]
    written: Marks
    others: tuple[Marks, ...]


LAYOUTS = (
    Layout("first dim sharded", (4,), ("0",), (("0",),)),
    Layout("last dim sharded", (4,), ("-1",), (("-1",),)),
    Layout("replicated, others sharded", (4,), ("R",), (("0",), ("-1",))),
    Layout("sharded, others mixed", (4,), ("0",), (("-1",), ("R",), ("P",))),
    Layout("sharded, others plain", (4,), ("-1",), (("plain",),)),
    Layout("plain, others mixed", (4,), ("plain",), (("0",), ("R",))),
    Layout("partial, others mixed", (4,), ("P",), (("0",), ("P",))),
    Layout("2x2: both dims sharded", (2, 2), ("0", "-1"), (("-1", "0"), ("R", "0"))),
    Layout("2x2: one dim sharded twice", (2, 2), ("0", "0"), (("R", "-1"), ("P", "0"))),
    Layout("1x4: sharded on both axes", (1, 4), ("0", "-1"), (("-1", "R"), ("P", "0"))),
    Layout("4x1: sharded on the axis of size 1", (4, 1), ("R", "0"), (("0", "P"), ("R", "-1"))),
)


@dataclass(frozen=True)
class Outcome:
    """The verdict of one rank on a case: "right", "wrong", "raised" or "refused"."""

    status: str
    message: str = ""


@dataclass(frozen=True)
class Failure:
    """A case that was not right."""

    op: str
    way: str
    layout: str
    status: str
    message: str


@dataclass
class Case:
    """A call in one of its forms, and its results on one device."""

    call: Call
    way: str
    run: Callable[[dict[str, Any]], Any]
    expected: Any = None
    graded: bool = False
    gradients: Any = None


# --- the forms of a call ---------------------------------------------------------------------------------------------


def ways(call: Call) -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
    """Yield the operator itself, and torch's public functions and methods of the same name."""
    yield "operator", lambda arguments: called(call.op, arguments)
    name = call.op._schema.name.split("::")[1]
    for where, function in _public(name):
        yield where, lambda arguments, function=function: _call_public(call, function, arguments)


def _public(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    if hasattr(Tensor, name):
        yield f"Tensor.{name}", getattr(Tensor, name)
    for module, prefix in (
        (torch, ""),
        (torch.linalg, "linalg_"),
        (torch.special, "special_"),
        (torch.fft, "fft_"),
        (_NN, ""),
    ):
        short = name.removeprefix(prefix)
        if name.startswith(prefix) and callable(getattr(module, short, None)):
            yield f"{module.__name__}.{short}", getattr(module, short)
            return


def _call_public(call: Call, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    schema = call.op._schema.arguments
    outs = [arguments[a.name] for a in schema if a.kwarg_only and is_written(a)]
    placed = [arguments[a.name] for a in schema if not a.kwarg_only and a.name in arguments]
    named = {a.name: arguments[a.name] for a in schema if a.kwarg_only and not is_written(a) and a.name in arguments}
    if outs:
        named["out"] = outs[0] if len(outs) == 1 else tuple(outs)
    return function(*placed, **named)


# --- one case --------------------------------------------------------------------------------------------------------


def carried_out(
    case: Case, place: Callable[[Tensor, bool], Any], graded: bool
) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """Return the results, the written arguments, and the leaves whose gradients are compared.

    `place` distributes a tensor; its second argument is True for a written tensor. A written tensor that requires a
    gradient is computed from a leaf.
    """
    leaves: list[Tensor] = []
    made: dict[int, Any] = {}

    def lay(x: Any, written: bool) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            laid = place(x.detach().clone(), written)
            if graded and x.is_floating_point():
                leaves.append(laid.requires_grad_())
                laid = laid * 1 if written else laid
            made[id(x)] = laid
        return made[id(x)]

    arguments: dict[str, Any] = {}
    for first in (True, False):  # written tensors go first, because they may occur among the others too
        for name, value in case.call.arguments.items():
            if (name in case.call.written) is first:
                arguments[name] = tree_map(lambda x, first=first: lay(x, first), value)
    _samples.seed_all(1)
    out = case.run(arguments)
    return out, {n: arguments[n] for n in case.call.written if n in arguments}, leaves


def _differentiated(out: Any, written: Any, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    targets = [x for x in tree_leaves((out, written)) if isinstance(x, Tensor)]
    weights = [_samples._weights(x, k) if x.requires_grad else None for k, x in enumerate(targets)]
    _samples.weighted_sum(targets, weights).backward()
    return [x.grad for x in leaves]


def prepared(call: Call) -> list[Case]:
    """Return every form of the call that one device accepts, with its numbers."""
    cases: list[Case] = []
    for name, run in ways(call):
        case = Case(call, name, run)
        try:
            with torch.no_grad():
                out, written, _ = carried_out(case, lambda x, _: x, False)
            case.expected = tree_map(_kept, (out, written))
        except Exception:
            continue
        if cases and _samples.differ(case.expected, cases[0].expected) is not None:
            continue  # another function of that name
        _add_gradients(case)
        cases.append(case)
    return cases


def _add_gradients(case: Case) -> None:
    if any(a.kwarg_only for a in case.call.op._schema.arguments if is_written(a)):
        return  # torch refuses `out=` if gradients are required, or treats the result as a constant
    try:
        out, written, leaves = carried_out(case, lambda x, _: x, True)
        gradients = _differentiated(out, written, leaves)
    except Exception:  # not differentiable
        return
    case.graded, case.gradients = True, [None if g is None else g.clone() for g in gradients]


def _kept(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


class Laying:
    """A function that distributes the tensors of a call on the calling rank."""

    def __init__(self, library: Ours, layout: Layout) -> None:
        self.library, self.layout, self.others = library, layout, 0

    def __call__(self, x: Tensor, written: bool) -> Any:
        marks = self.layout.written
        if not written:
            marks = self.layout.others[self.others % len(self.layout.others)]
            self.others += 1
        if marks == ("plain",):
            return x
        marks = tuple(_mark(m, x) for m in marks)
        return self.library.place(x, self.layout.mesh, marks, lambda n: _samples.exact_terms(x, n)).detach()


def _mark(mark: str, x: Tensor) -> str:
    if mark == "P":
        return "R" if x.dtype is torch.bool or x.dtype.itemsize == 1 or x.dtype in UNADDED else "P"
    if mark == "R" or not x.dim():
        return "R"
    return f"S{int(mark) % x.dim()}"


def tried(case: Case, layout: Layout, library: Ours) -> Outcome:
    """Return the verdict of the calling rank on one case under one layout."""
    with torch.no_grad():
        found = _values(case, layout, library)
    if found.status != "right" or not case.graded:
        return found
    try:
        out, written, leaves = carried_out(case, Laying(library, layout), True)
        gradients = _differentiated(out, written, leaves)
    except MeshwrightError as error:
        return Outcome("refused", _words(error))
    except Exception as error:
        return Outcome("raised", f"with gradients: {_words(error)}")
    message = _samples.differ([_whole(x) for x in tree_leaves((out, written))], tree_leaves(case.expected))
    if message is not None:
        return Outcome("wrong", f"with gradients: {message}")
    for k, (mine, wanted) in enumerate(zip(gradients, case.gradients, strict=True)):
        if wanted is None or (mine is None and not wanted.any()):
            continue
        message = _samples.differ(_whole(mine), wanted)
        if message is not None:
            return Outcome("wrong", f"gradient {k}: {message}")
    return Outcome("right")


def _values(case: Case, layout: Layout, library: Ours) -> Outcome:
    laid: list[tuple[Tensor, Any]] = []
    place = Laying(library, layout)

    def kept(x: Tensor, written: bool) -> Any:
        laid.append((x.clone(), place(x, written)))
        return laid[-1][1]

    try:
        out, written, _ = carried_out(case, kept, False)
    except MeshwrightError as error:
        changed = [m for x, y in laid if (m := _samples.differ(_whole(y), x)) is not None]
        return Outcome("wrong", f"refused and changed: {changed[0]}") if changed else Outcome("refused", _words(error))
    except Exception as error:
        return Outcome("raised", _words(error))
    message = _samples.differ(tree_map(_whole, (out, written)), case.expected)
    return Outcome("right") if message is None else Outcome("wrong", message)


def _whole(x: Any) -> Any:
    return mw.unshard_dtensor(x).detach() if isinstance(x, mw.DistTensor) else x


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def failures_of(call: Call, library: Ours) -> tuple[int, list[Failure]]:
    """Return the number of cases of a call, and the failures."""
    cases = prepared(call)
    jobs = [(case, layout) for case in cases for layout in LAYOUTS]

    def go() -> list[Outcome]:
        return [tried(case, layout, library) for case, layout in jobs]

    try:
        per_rank = mw.simulate(go, RANKS)
    except Exception as error:
        return len(jobs), [Failure(call.name, "", "", "raised", f"the ranks parted: {_words(error)}")]
    found: list[Failure] = []
    for (case, layout), outcomes in zip(jobs, zip(*per_rank, strict=True), strict=True):
        worst = min(outcomes, key=lambda o: ("wrong", "raised", "refused", "right").index(o.status))
        if worst.status != "right":
            found.append(Failure(call.name, case.way, layout.name, worst.status, worst.message))
    return len(jobs), found


# --- the sweep -------------------------------------------------------------------------------------------------------


def sweep(operators: Sequence[Any], most: int = 1, show: bool = False) -> dict[str, Any]:
    """Return the counts of cases and outcomes over operators, and the failures."""
    library, recorded = Ours(), record()
    cases, failures, unbuilt = 0, list[Failure](), dict[str, str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators:
            calls = calls_of(op, recorded, most)
            if isinstance(calls, str):
                unbuilt[str(op)] = calls
                continue
            for call in calls:
                count, found = failures_of(call, library)
                cases, failures = cases + count, failures + found
                for failure in found if show else ():
                    print(failure, flush=True)
    return {"cases": cases, "failures": failures, "unbuilt": unbuilt}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of cases that are wrong or raise an error."""
    torch.set_num_threads(1)
    start, operators = time.perf_counter(), mutating_operators()
    operators = operators[::QUICK] if quick else operators
    found = sweep(operators)
    counts = Counter(f.status for f in found["failures"])
    value = counts["wrong"] + counts["raised"]
    return {
        "name": "mutations",
        "value": value,
        "goal": 0,
        "ok": value == 0,
        "rival": None,
        "details": {
            "operators": len(operators) - len(found["unbuilt"]),
            "cases": found["cases"],
            **{status: counts[status] for status in ("wrong", "raised", "refused")},
            "failures": [vars(f) for f in found["failures"] if f.status != "refused"][:40],
            "refused_operators": sorted({f.op for f in found["failures"] if f.status == "refused"}),
            "not_built": dict(Counter(found["unbuilt"].values())),
            "not_built_operators": sorted(found["unbuilt"]),
            "seconds": round(time.perf_counter() - start),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th operator")
    parser.add_argument("--op", help="only operators with this in their name, each failure printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.op is None:
        print(json.dumps(run(args.quick)))
        return
    chosen = [op for op in mutating_operators() if args.op in str(op)]
    found = sweep(chosen, most=4, show=True)
    print(found["cases"], "cases;", Counter(f.status for f in found["failures"]), found["unbuilt"])


if __name__ == "__main__":
    main()
