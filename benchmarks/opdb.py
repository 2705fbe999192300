"""Operator samples of torch on distributed tensors over four simulated ranks: right results.

Every entry of `op_db` is called on its samples under every layout of `_samples.variants`, forward and backward. An
entry is `right` if no sample under any layout gave another number or raised, `wrong` if one gave another number,
`raised` if none was wrong but one raised. Torch's DTensor runs the same samples and layouts.

    python -m benchmarks.opdb                       the figure, with the rival's stored table
    python -m benchmarks.opdb --rival measured      the figure, with a new measurement of the rival
    python -m benchmarks.opdb --op cumsum --verbose one entry, every failure
    python -m benchmarks.opdb --json out.json       every entry's row

A library runs in a child process, so that a crash or a hang costs one entry and not the sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks import _samples
from benchmarks._samples import RANKS, Case, Entry, Variant

CACHE = Path(__file__).parent / "rivals" / "dtensor_opdb.json"
ENTRY_SECONDS = 600.0
LOG = bool(os.environ.get("BENCHMARKS_LOG"))  # print each row at once to standard error
FINE = "ended with code 0"
STUCK = "the ranks wait for each other"
STATUSES = ("right", "wrong", "raised", "left_out")


@dataclass(frozen=True)
class Failure:
    """The first failure in one variant."""

    status: str  # "wrong" or "raised"
    message: str


@dataclass(frozen=True)
class Row:
    """The outcome of one entry."""

    name: str
    status: str
    variant: str = ""
    sample: str = ""
    message: str = ""
    cases: int = 0
    random: bool = False
    seconds: float = 0.0


# --- the libraries -----------------------------------------------------------------------------------------------

Job = Callable[[], Failure | None]
Shape = tuple[int, ...]
Marks = tuple[str, ...]  # one per mesh axis, as in `_samples.Variant`
Terms = Callable[[int], list[torch.Tensor]]  # the value as a sum of so many terms


class Library(Protocol):
    """Interface of a library in the sweep. `place`, `whole` and `backward` are called on every rank."""

    name: str

    def run(self, jobs: Sequence[Job]) -> list[Failure | None]: ...
    def place(self, value: torch.Tensor, mesh: Shape, marks: Marks, terms: Terms) -> Any: ...
    def whole(self, x: Any) -> Any: ...
    def backward(self, targets: Sequence[Any], weights: Sequence[Any]) -> None: ...


class Plain:
    """One device in place of a library, which shows errors of the sweep itself."""

    name = "plain"

    def run(self, jobs: Sequence[Job]) -> list[Failure | None]:
        return [_guarded(job) for job in jobs]

    def place(self, value: torch.Tensor, mesh: Shape, marks: Marks, terms: Terms) -> Any:
        if "P" not in marks:
            return _samples.fresh(value)
        pending = terms(mesh[marks.index("P")])
        return sum(pending[1:], pending[0]).to(value.dtype).requires_grad_(value.requires_grad)

    def whole(self, x: Any) -> Any:
        return x

    def backward(self, targets: Sequence[Any], weights: Sequence[Any]) -> None:
        _samples.weighted_sum(targets, weights).backward()


class Ours:
    """Meshwright on simulated ranks."""

    name = "meshwright"

    def __init__(self) -> None:
        import meshwright

        self.mw = meshwright

    def run(self, jobs: Sequence[Job]) -> list[Failure | None]:
        """Run all jobs in one simulation; run them one by one if they cannot be finished together."""
        try:
            per_rank = self.mw.simulate(lambda: [_guarded(job) for job in jobs], RANKS)
        except Exception as error:
            if len(jobs) == 1:
                return [_raised(error)]
            return [self.run([job])[0] for job in jobs]
        return [_worst(found) for found in zip(*per_rank, strict=True)]

    def place(self, value: torch.Tensor, mesh: Shape, marks: Marks, terms: Terms) -> Any:
        mw = self.mw
        if "P" not in marks:
            return mw.shard_tensor(_samples.fresh(value), *self.layout(mesh, marks))
        pending = [k for k, mark in enumerate(marks) if mark == "P"]
        at = _coordinate(self.rank(), mesh)
        term = terms(math.prod(mesh[k] for k in pending))[_index([at[k] for k in pending], [mesh[k] for k in pending])]
        start = tuple(mark if mark == "P" else "R" for mark in marks)
        with torch.no_grad():
            laid = mw.dtensor_from_local(term.clone(), *self.layout(mesh, start))
            in_order = mw.shard_tensor(_samples.fresh(value), *self.layout(mesh, ("R",) * len(mesh)))
            laid = self.reshard(in_order, mesh, marks).copy_(self.reshard(laid, mesh, marks))
        return laid.detach().requires_grad_(value.requires_grad)

    def reshard(self, x: Any, mesh: Shape, marks: Marks) -> Any:
        return self.mw.reshard(x, *self.layout(mesh, marks))

    def layout(self, mesh: Shape, marks: Marks) -> tuple[Any, list[Any]]:
        on = self.mw.ProcessMesh(np.arange(math.prod(mesh)).reshape(mesh), dim_names=["x", "y", "z"][: len(mesh)])
        return on, [_placement(self.mw, mark) for mark in marks]

    def rank(self) -> int:
        from meshwright.comm import current_communicator

        return current_communicator().rank

    def whole(self, x: Any) -> Any:
        return self.mw.unshard_dtensor(x) if isinstance(x, self.mw.DistTensor) else x

    def backward(self, targets: Sequence[Any], weights: Sequence[Any]) -> None:
        _samples.weighted_sum(targets, weights).backward()


class DTensorRival:
    """Torch's DTensor on threads, one per rank, that share torch's threaded process group."""

    name = "dtensor"

    def __init__(self) -> None:
        from torch.distributed import tensor

        self.tensor = tensor
        self.ranks = _ThreadedRanks(RANKS)

    def run(self, jobs: Sequence[Job]) -> list[Failure | None]:
        return [_worst(self.ranks(lambda job=job: _guarded(job))) for job in jobs]

    def place(self, value: torch.Tensor, mesh: Shape, marks: Marks, terms: Terms) -> Any:
        on = self.ranks.mesh(mesh)
        coordinate = _coordinate(torch.distributed.get_rank(), mesh)
        local = value.detach()
        if "P" in marks:
            axis = marks.index("P")
            local = terms(mesh[axis])[coordinate[axis]]
        for axis, mark in enumerate(marks):
            local = _chunk(local, mark, mesh[axis], coordinate[axis])
        wanted = [_placement(self.tensor, mark) for mark in marks]
        laid = self.tensor.DTensor.from_local(
            local.clone(), on, wanted, run_check=False, shape=value.shape, stride=value.stride()
        )
        return laid.requires_grad_(value.requires_grad)

    def whole(self, x: Any) -> Any:
        return x.full_tensor() if isinstance(x, self.tensor.DTensor) else x

    def backward(self, targets: Sequence[Any], weights: Sequence[Any]) -> None:
        """Compute gradients of the weighted sum of gathered values, so that only the entry's own gradient is tested."""
        _samples.weighted_sum([self.whole(t) for t in targets], weights).backward()


LIBRARIES: dict[str, Callable[[], Library]] = {"meshwright": Ours, "dtensor": DTensorRival, "plain": Plain}


def _shapes(size: int) -> list[Shape]:
    """Return the shapes of the meshes in `_samples.variants`."""
    return [(size,), (2, size // 2), (1, size), (size, 1)]


def _placement(library: Any, mark: str) -> Any:
    if mark == "P":
        return library.Partial("sum")
    return library.Replicate() if mark == "R" else library.Shard(int(mark[1:]))


def _coordinate(rank: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(rank, mesh))


def _index(at: Sequence[int], shape: Sequence[int]) -> int:
    return int(np.ravel_multi_index(tuple(at), tuple(shape)))


def _chunk(local: torch.Tensor, mark: str, ranks: int, at: int) -> torch.Tensor:
    """Return the part of a tensor sharded as by `torch.chunk`; empty past the end."""
    if not mark.startswith("S"):
        return local
    dim = int(mark[1:])
    pieces = torch.chunk(local, ranks, dim)
    return pieces[at] if at < len(pieces) else local.narrow(dim, 0, 0)


def _guarded(job: Job) -> Failure | None:
    try:
        return job()
    except Exception as error:
        return _raised(error)


def _raised(error: BaseException) -> Failure:
    text = " ".join(str(error).split())
    return Failure("raised", f"{type(error).__name__}: {text[:300]}")


def _worst(found: Sequence[Failure | None]) -> Failure | None:
    """Return the worst result of the ranks: a wrong number first, then a rank's own error."""
    failures = [f for f in found if f is not None]
    return min(failures, key=lambda f: (f.status != "wrong", "SystemExit" in f.message), default=None)


class Stuck(BaseException):
    """Ranks wait for each other and cannot be interrupted: the process is lost."""


class _ThreadedRanks:
    """Permanent threads, one per rank, each with torch's threaded process group."""

    def __init__(self, size: int, patience: float = 4.0) -> None:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded

        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        self.group = threaded.ProcessLocalGroup
        self.size, self.patience = size, patience
        self.store = torch.distributed.HashStore()
        self.meshes = threading.local()
        self.answers: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.jobs: list[queue.Queue[Callable[[], Any]]] = [queue.Queue() for _ in range(size)]
        for rank in range(size):
            threading.Thread(target=self._work, args=(rank,), daemon=True).start()
        self(self._make_meshes)

    def _make_meshes(self) -> None:
        make = torch.distributed.device_mesh.init_device_mesh
        self.meshes.by_shape = {shape: make("cpu", shape) for shape in _shapes(self.size)}

    def mesh(self, shape: tuple[int, ...]) -> Any:
        return self.meshes.by_shape[shape]

    def _work(self, rank: int) -> None:
        torch.distributed.init_process_group("threaded", rank=rank, world_size=self.size, store=self.store)
        while True:
            job = self.jobs[rank].get()
            try:
                answer = job()
            except BaseException as error:
                answer = _raised(error)
            if isinstance(answer, Failure):
                self._wake()
            self.answers.put((rank, answer))

    def _wake(self) -> None:
        """End every wait for a rank that will not arrive."""
        with self.group._coll_lock:
            self.group._terminate.set()
            under_way = list(self.group._cur_coll_on_pgs.values())
        for collective in under_way:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()

    def _woken(self) -> tuple[int, Failure]:
        self._wake()
        with contextlib.suppress(queue.Empty):
            return self.answers.get(timeout=self.patience)[0], Failure("raised", STUCK)
        raise Stuck

    def __call__(self, job: Callable[[], Any]) -> list[Any]:
        for waiting in self.jobs:
            waiting.put(job)
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            try:
                rank, answer = self.answers.get(timeout=self.patience)
            except queue.Empty:
                rank, answer = self._woken()
            answers[rank] = answer
        self.group.reset()
        return [answers[rank] for rank in range(self.size)]


# --- one entry ---------------------------------------------------------------------------------------------------


def attempt(library: Library, case: Case, variant: Variant) -> Failure | None:
    """Return one rank's result of one case in one layout."""
    marks = _samples.marks_by_position(case, variant)
    with contextlib.nullcontext() if case.grads else torch.no_grad():
        values = [
            library.place(v, variant.mesh, marks[i], partial(case.terms, i)) if i in marks else _samples.fresh(v)
            for i, v in enumerate(case.flat)
        ]
        raw, results = _samples.evaluate(case, values)
    found = tree_map(library.whole, raw)
    message = _samples.differ(found, case.outs)
    if message and not _as_exact(case, found, lambda truth: truth[0]):
        return Failure("wrong", message)
    if not case.grads:
        return None
    targets = [t for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor)]
    if any(w is not None and not t.requires_grad for t, w in zip(targets, case.weights, strict=True)):
        return Failure("wrong", "an output lost its gradient")
    library.backward(targets, case.weights)
    return _compare_grads(library, case, values)


def _as_exact(case: Case, found: Any, part: Callable[[Any], Any]) -> bool:
    """True if a part of the results has no more rounding than that of one device."""
    exact = case.exact
    return exact is not None and any(_samples.as_exact_as(found, part(t), part(exact)) for t in case.truths)


def _compare_grads(library: Library, case: Case, values: Sequence[Any]) -> Failure | None:
    for i, wanted in enumerate(case.grads):
        if wanted is None:
            continue
        if values[i].grad is None:
            return Failure("wrong", f"gradient of argument {i}: missing")
        found = library.whole(values[i].grad)
        message = _samples.differ(found, wanted)
        if message and not _as_exact(case, found, lambda truth, i=i: truth[1][i]):
            return Failure("wrong", f"gradient of argument {i}: {message}")
    return None


def try_entry(library: Library, entry: Entry, cap: int, verbose: bool = False) -> Row:
    """Return the entry's row. Stops at the first wrong case; continues after a case that raised."""
    if reason := _left_out(entry):
        return Row(entry.name, "left_out", message=reason)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = _tried(library, entry, cap, verbose)
    return Row(**{**asdict(row), "seconds": round(time.perf_counter() - start, 3)})


def _tried(library: Library, entry: Entry, cap: int, verbose: bool) -> Row:
    cases = _samples.draw(entry, cap)
    random = any(case.is_random for case in cases)
    if not cases:
        return Row(entry.name, "left_out", message="no sample has a value on a single device")
    row = Row(entry.name, "right", cases=len(cases), random=random)
    for case in cases:
        variants = _samples.variants(case)
        found = library.run([partial(attempt, library, case, variant) for variant in variants])
        for variant, failure in zip(variants, found, strict=True):
            if verbose:
                print(f"  {case.describe()} | {variant.name} {variant.marks}: {failure or 'right'}")
            row = _fold(row, case, variant, failure)
        if row.status == "wrong" and not verbose:
            break
    return row


def _left_out(entry: Entry) -> str | None:
    if entry.dtype is None:
        return _samples.NO_CPU_KERNEL
    return _samples.LEFT_OUT.get(Entry(entry.op).name)


def _fold(row: Row, case: Case, variant: Variant, failure: Failure | None) -> Row:
    """Return the row after one more case: the worst so far, and the first among equals."""
    if failure is None or STATUSES.index(failure.status) * (row.status != "wrong") == 0:
        return row
    if row.status == failure.status:
        return row
    where = f"{variant.name} {variant.marks}"
    return Row(row.name, failure.status, where, case.describe(), failure.message, row.cases, row.random)


# --- the sweep ---------------------------------------------------------------------------------------------------


def work(library_name: str, names: Sequence[str] | None, first: int, cap: int, kinds: Sequence[str]) -> None:
    """Print one JSON line per entry in the child process."""
    torch.set_num_threads(1)
    library = LIBRARIES[library_name]()
    chosen = _chosen(names, kinds)
    for entry in chosen[first:]:
        try:
            row = try_entry(library, entry, cap)
        except Exception as error:
            row = Row(entry.name, "raised", message=f"the sweep: {_raised(error).message}")
        except Stuck:
            _say(Row(entry.name, "raised", message=STUCK))
            break
        _say(row)
    os._exit(0)


def _say(row: Row) -> None:
    print("row " + json.dumps(asdict(row)), flush=True)


def _chosen(names: Sequence[str] | None, kinds: Sequence[str]) -> list[Entry]:
    return [e for e in _samples.entries(kinds) if names is None or e.name in names or e.op.name in names]


def sweep(
    library: str, cap: int, kinds: Sequence[str] = ("function",), names: Sequence[str] | None = None
) -> list[Row]:
    """Return every entry's row, from as many child processes as crashes and hangs require."""
    chosen = [e.name for e in _chosen(names, kinds)]
    rows: list[Row] = []
    while len(rows) < len(chosen):
        before = len(rows)
        why = _run_child(library, cap, kinds, names, rows)
        if len(rows) < len(chosen) and (why != FINE or len(rows) == before):
            rows.append(Row(chosen[len(rows)], "raised", message=f"the process {why}"))
    return rows


def _run_child(library: str, cap: int, kinds: Sequence[str], names: Sequence[str] | None, rows: list[Row]) -> str:
    """Add rows until the child ends or is silent for too long; return the reason."""
    command = [sys.executable, "-m", "benchmarks.opdb", "--worker", library, "--first", str(len(rows))]
    command += ["--cap", str(cap), "--kinds", ",".join(kinds)]
    if names is not None:
        command += ["--only", ",".join(names)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_pump, args=(child, lines), daemon=True).start()
    try:
        while line := lines.get(timeout=ENTRY_SECONDS):
            if line.startswith("row "):
                rows.append(Row(**json.loads(line[4:])))
                if LOG:
                    print(line.rstrip()[:300], file=sys.stderr, flush=True)
        child.wait(ENTRY_SECONDS)
    except (queue.Empty, subprocess.TimeoutExpired):
        return f"gave no answer within {ENTRY_SECONDS:g} s"
    finally:
        child.kill()
        child.wait()
    return f"ended with code {child.returncode}"


def _pump(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put("")


def counts(rows: Sequence[Row]) -> dict[str, int]:
    found = Counter(row.status for row in rows)
    return {status: found[status] for status in STATUSES}


def rival_counts(rows: Sequence[Row]) -> dict[str, int]:
    """Return the rival's counts. Its threads share a random generator, so wrong random numbers do not count."""
    fair = [row for row in rows if not (row.random and row.status == "wrong")]
    return {**counts(fair), "random_not_counted": len(rows) - len(fair)}


def _by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each kind of use; a function's row has no kind in its name."""
    found: dict[str, list[Row]] = {kind: [] for kind in _samples.KINDS}
    for row in rows:
        found[next((k for k in _samples.KINDS if row.name.endswith(f"({k})")), "function")].append(row)
    return found


def rival_rows(cap: int, kinds: Sequence[str], cached: bool) -> tuple[list[Row], dict[str, Any]]:
    """Return the rival's rows and their origin; measured rows are stored for later runs."""
    if cached and CACHE.exists():
        table = json.loads(CACHE.read_text())
        if table["torch"] == torch.__version__:
            return [Row(**row) for row in table["rows"]], {"cached": True, "cap": table["cap"]}
    rows = sweep("dtensor", cap, [kind for kind in kinds if kind in _samples.RIVAL_KINDS])
    CACHE.parent.mkdir(exist_ok=True)
    table = {"torch": torch.__version__, "cap": cap, "rows": [_brief(row) for row in rows]}
    lines = ",\n".join(json.dumps(row) for row in table.pop("rows"))
    CACHE.write_text(json.dumps(table)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    return rows, {"cached": False, "cap": cap}


def _brief(row: Row) -> dict[str, Any]:
    return {k: v[:160] if isinstance(v, str) else v for k, v in asdict(row).items() if v != "" and k != "seconds"}


def run(quick: bool = False, rival: str = "cached") -> dict[str, Any]:
    """Return the figure. The rival's stored table is used if it was made with this torch and `rival` is "cached"."""
    cap, kinds = (2, ("function",)) if quick else (8, _samples.KINDS)
    start = time.perf_counter()
    ours = sweep("meshwright", cap, kinds)
    ours_seconds = time.perf_counter() - start
    theirs, source = rival_rows(cap, kinds, cached=rival != "measured")
    mine, their = _by_kind(ours), _by_kind(theirs)
    functions, tallies = mine.pop("function"), {kind: counts(rows) for kind, rows in mine.items()}
    tally = counts(functions)
    tried = len(functions) - tally["left_out"]
    failed = sum(found["wrong"] + found["raised"] for found in tallies.values())
    return {
        "name": "opdb",
        "value": tally["right"],
        "goal": tried,
        "ok": tally["right"] == tried and not failed,
        "rival": {"dtensor": rival_counts(their["function"])},
        "details": {
            "ours": tally,
            "other_kinds": tallies,
            "in_place_and_views": {"dtensor": rival_counts([*their["in place"], *their["view"]])},
            "random": counts([row for row in ours if row.random]),
            "left_out": {row.name: row.message for row in functions if row.status == "left_out"},
            "failures": [_brief(row) for row in ours if row.status in ("wrong", "raised")],
            "samples_per_entry": cap,
            "rival_source": {**source, "torch": torch.__version__},
            "seconds": round(ours_seconds),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two samples per entry, functions only")
    parser.add_argument("--rival", choices=["cached", "measured"], default="cached")
    parser.add_argument("--op", help="try one entry in this process")
    parser.add_argument("--library", choices=sorted(LIBRARIES), default="meshwright")
    parser.add_argument("--verbose", action="store_true", help="with --op: print every case")
    parser.add_argument("--json", type=Path, help="sweep one library and write every entry's row here")
    parser.add_argument("--cap", type=int, default=8, help="samples per entry")
    parser.add_argument("--kinds", default=",".join(_samples.KINDS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--only", help="comma-separated entry names")
    args = parser.parse_args()
    names, kinds = args.only.split(",") if args.only else None, args.kinds.split(",")
    if args.worker:
        work(args.worker, names, args.first, args.cap, kinds)
    elif args.op:
        _try_here(args.library, args.op, args.cap, kinds, args.verbose)
    elif args.json:
        rows = sweep(args.library, args.cap, kinds, names)
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=0))
        print(json.dumps(counts(rows)))
    else:
        print(json.dumps(run(args.quick, args.rival)))


def _try_here(library_name: str, name: str, cap: int, kinds: Sequence[str], verbose: bool) -> None:
    torch.set_num_threads(1)
    library = LIBRARIES[library_name]()
    for entry in _chosen([name], kinds):
        print(json.dumps(asdict(try_entry(library, entry, cap, verbose))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
