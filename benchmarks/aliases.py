"""Operators of torch whose result may share memory with an argument: wrong results.

For each call, each memory format of its argument and each layout, a program writes to the result or to the source.
Other programs write to the last of a chain of two or three views, of a base in one of several memory orders. The
values of view and base, version counters, strides, contiguity and gradients must equal those of one device on every
rank. If one device raises an error, every rank must raise an error too. A program for which every rank raises
OperationError is counted apart.

    python -m benchmarks.aliases                    the figure
    python -m benchmarks.aliases --op reshape       the calls of one operator, every failure
    python -m benchmarks.aliases --op chains        the chains of views, every failure
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from benchmarks import _samples
from benchmarks._alias_cases import ViewCall, has_method, tensors_of, view_calls, view_operators
from benchmarks._view_chains import Chain, chains, strides_of
from benchmarks.opdb import Failure, Ours

Marks = tuple[str, ...]

LAYOUTS: tuple[tuple[tuple[int, ...], Marks], ...] = (
    ((1,), ("S0",)),
    ((1,), ("P",)),
    ((2,), ("R",)),
    ((2,), ("P",)),
    ((2,), ("S0",)),
    ((3,), ("S0",)),
    ((2,), ("S1",)),
    ((4,), ("S1",)),
    ((2,), ("S2",)),
    ((5,), ("S2",)),
    ((2, 2), ("S0", "S1")),
    ((2, 2), ("S0", "S0")),
    ((2, 2), ("P", "S2")),
    ((1, 2), ("S0", "S1")),
    ((2, 1), ("S0", "S0")),
)
"""Mesh shapes and one mark per mesh axis: `R` replicated, `P` a pending sum, `S0` sharded along dim 0."""


def _transposed(x: Any) -> Any:
    return x.permute(*range(x.dim() - 1, -1, -1))


def _sliced(x: Any) -> Any:
    return x[..., 1:-1]


FORMATS: dict[str, tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[Any], Any]]] = {
    "contiguous": (lambda s: s, lambda x: x),
    "transposed": (lambda s: s[::-1], _transposed),
    "sliced": (lambda s: (*s[:-1], s[-1] + 2), _sliced),
    "strided": (lambda s: (2 * s[0], *s[1:]), lambda x: x[::2]),
    "expanded": (lambda s: (1, *s[1:]), lambda x: x.expand(4, *[-1] * (x.dim() - 1))),
}
"""Memory format of an operator's argument → shape of the base, and the view of the base that is the argument."""

WRITES = ("result", "last result", "source", "base")


@dataclass(frozen=True)
class Story:
    """One program: a call on an argument of one memory format, and the tensor that is written to."""

    call: ViewCall
    method: bool
    format: str
    write: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the call's argument."""
        return self.call.shape

    @property
    def operator(self) -> str:
        """Return the name of the operator."""
        return self.call.base

    @property
    def name(self) -> str:
        """Return a description of the call, the memory format and the write."""
        how = "method " if self.method else ""
        return f"{how}{self.call.name} of a {self.format} tensor, write to the {self.write}"

    def base(self) -> Tensor:
        """Return the value of the base, the same in every process."""
        shape = FORMATS[self.format][0](self.call.shape)
        count = math.prod(shape)
        value = ((torch.arange(count) * 7) % 23 - 11).reshape(shape).to(self.call.dtype)
        return value * (1 + 0.5j) if value.is_complex() else value

    def run(self, leaf: Any) -> dict[str, Any]:
        """Return the values, versions and strides that the program computes."""
        base = leaf * 1
        source = FORMATS[self.format][1](base)
        out = self.call.as_method(source) if self.method else self.call(source)
        results = tensors_of(out)
        facts: dict[str, Any] = {
            "strides": [strides_of(r) for r in results],
            "contiguous": [r.is_contiguous() for r in results],
            "same": [r is source for r in results],
        }
        self._write(base, source, results)
        facts["versions"] = [t._version - base._version for t in (source, *results)]
        facts["values"] = [base, source, *results]
        return facts

    def _write(self, base: Any, source: Any, results: Sequence[Any]) -> None:
        if self.write == "result":
            results[0].mul_(2)
        elif self.write == "last result":
            with torch.no_grad():
                results[-1].add_(1)
        elif self.write == "source":
            source.mul_(3)
        else:
            base.add_(1)


def stories(operators: Sequence[Any] | None = None) -> Iterator[Story]:
    """Yield every program over the calls of these operators, by default of all."""
    for op in view_operators() if operators is None else operators:
        for call in view_calls(op):
            several = len(tensors_of(call(torch.zeros(call.shape, dtype=call.dtype)))) > 1
            writes = [w for w in WRITES if several or w != "last result"]
            methods = (False, True) if has_method(call) else (False,)
            found = (Story(call, *how) for how in product(methods, FORMATS, writes))
            yield from (s for s in found if "result" not in s.write or not _partly_overlaps(s))


def _partly_overlaps(story: Story) -> bool:
    """True if elements of a result share memory and no stride is 0; the effect of a write is then undefined."""
    try:
        out = story.call(FORMATS[story.format][1](story.base()))
    except RuntimeError:
        return False
    for x in tensors_of(out):
        places = torch.arange(x.untyped_storage().nbytes() // x.itemsize).as_strided(x.shape, x.stride())
        if 0 not in x.stride() and places.unique().numel() < x.numel():
            return True
    return False


Program = Story | Chain


def _outcome(story: Program, leaf: Any, whole: Callable[[Any], Any]) -> dict[str, Any] | str:
    """Return the facts, whole values and the gradient; a text that begins with "raises" if the program fails."""
    try:
        facts = story.run(leaf)
        values = facts.pop("values")
        total: Any = 0
        for k, v in enumerate(values):
            if v.requires_grad:
                part = (v * (k + 1)).sum()
                total = total + (part.real if part.is_complex() else part)
        total.backward()
        return {**facts, "values": [whole(v).detach() for v in values], "grad": whole(leaf.grad)}
    except Exception as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:240]}"


@cache
def _wanted(story: Program) -> dict[str, Any] | str:
    return _outcome(story, story.base().requires_grad_(), lambda x: x)


def _attempt(library: Ours, story: Program, mesh: tuple[int, ...], marks: Marks) -> Failure | None:
    """Return the failure of one rank, or None."""
    value = story.base().requires_grad_()
    leaf = library.place(value, mesh, marks, lambda n: _samples.exact_terms(value.detach(), n))
    wanted, found = _wanted(story), _outcome(story, leaf, library.whole)
    if isinstance(wanted, str) or isinstance(found, str):
        if isinstance(wanted, str) and isinstance(found, str):
            return None
        status = "wrong" if not isinstance(found, str) else "refused" if "OperationError" in found else "raised"
        return Failure(status, f"{found}, wanted {wanted}"[:400])
    for key, value in wanted.items():
        if message := _samples.differ(found[key], value):
            return Failure("wrong", f"{key}: {message}")
    return None


def _fits(story: Program, marks: Marks) -> bool:
    dims = [int(m[1:]) for m in marks if m.startswith("S")]
    return all(d < len(story.shape) for d in dims)


def sweep(
    programs: Sequence[Program], layouts: Sequence[Any] = LAYOUTS
) -> Iterator[tuple[Program, Any, Failure | None]]:
    """Yield each program with each layout, and its failure or None."""
    library = Ours()
    for mesh, marks in layouts:
        for start in range(0, len(programs), 64):
            part = [s for s in programs[start : start + 64] if _fits(s, marks)]
            for story in part:
                _wanted(story)
            found = _run(library, [partial(_attempt, library, s, mesh, marks) for s in part], math.prod(mesh))
            yield from ((s, (mesh, marks), f) for s, f in zip(part, found, strict=True))


def _run(library: Ours, jobs: Sequence[Callable[[], Failure | None]], ranks: int) -> list[Failure | None]:
    try:
        per_rank = library.mw.simulate(lambda: [job() for job in jobs], ranks)
    except Exception as error:
        if len(jobs) == 1:
            return [Failure("raised", f"{type(error).__name__}: {error}"[:400])]
        return [_run(library, [job], ranks)[0] for job in jobs]
    return [next((f for f in found if f is not None), None) for found in zip(*per_rank, strict=True)]


def sweep_chains(step: int) -> Iterator[tuple[Program, Any, Failure | None]]:
    """Yield one chain in `step` for each layout, other chains for other layouts, and its failure or None."""
    for k, layout in enumerate(LAYOUTS):
        yield from sweep(list(islice(chains(), k * 7 % step, None, step)), [layout])


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of programs and layouts whose results are not those of one device."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    programs = list(stories())
    found = [*sweep(programs[::23] if quick else programs), *sweep_chains(601 if quick else 29)]
    refused = Counter(s.operator for s, _, f in found if f is not None and f.status == "refused")
    failures = [(s, where, f) for s, where, f in found if f is not None and f.status != "refused"]
    return {
        "name": "aliases",
        "value": len(failures),
        "goal": 0,
        "ok": not failures,
        "rival": None,
        "details": {
            "cases": len(found),
            "operators": len({s.call.op for s in programs}),
            "chains": sum(isinstance(s, Chain) for s, _, _ in found),
            "refused": dict(refused),
            "by_status": dict(Counter(f.status for _, _, f in failures)),
            "failures": [f"{s.name}, {where}: {f.message}" for s, where, f in failures[:40]],
            "seconds": round(time.perf_counter() - start),
        },
    }


def main() -> None:
    """Print the figure, or every failure of one operator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one program in 23")
    parser.add_argument("--op", help="comma-separated names of operators, `all` or `chains`: print every failure")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.op is None:
        print(json.dumps(run(args.quick)))
        return
    names = args.op.split(",")
    chosen = [op for op in view_operators() if args.op == "all" or op._schema.name.removeprefix("aten::") in names]
    programs = list(stories(chosen))
    programs = programs[::23] if args.quick else programs
    found = list(sweep_chains(601 if args.quick else 29) if args.op == "chains" else sweep(programs))
    for s, where, f in found:
        if f is not None:
            print(f"{f.status}: {s.name}, {where}: {f.message}", file=sys.stdout)
    print(json.dumps({"cases": len(found), **Counter(f.status for _, _, f in found if f is not None)}))


if __name__ == "__main__":
    main()
