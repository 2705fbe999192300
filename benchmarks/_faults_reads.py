"""Rows 7, 8, 9 and 29: files that are damaged, hostile, do not fit, or never return data, read by two ranks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks._fault_runs import Ended, Verdict, run_ranks
from benchmarks.checkpoint_faults import damage_kinds
from meshwright.checkpoint import CheckpointError
from meshwright.checkpoint.formats.checksum_file import CHECKSUMS

LIMIT = 120.0
FORMS = ("meshwright", "safetensors", "dcp")
FLIPS, CUTS = 60, 10
READ_LIMIT = 2.0
LARGEST_PEAK = 100 << 20


def _state(zero: bool) -> dict[str, Any]:
    mesh = mw.ProcessMesh([0, 1], ["x"])
    w = torch.arange(1.0, 201.0).reshape(10, 20)
    w, b = (torch.zeros_like(w), torch.zeros(7)) if zero else (w, torch.ones(7))
    return {"w": mw.shard_tensor(w, mesh, [mw.Shard(0)]), "b": b}


def _load_error(path: Path) -> CheckpointError | None:
    """Load, and return the error; AssertionError if an error lacks one of the four parts, or something was loaded."""
    state, error = _state(zero=True), None
    try:
        mw.load_state_dict(state, path)
    except CheckpointError as caught:
        error = caught
    if error is not None:
        untouched = not state["w"].to_local().any() and not state["b"].any()
        if not untouched or not all((error.asked, error.found, error.why, error.write)):
            raise AssertionError(f"{error}: something was loaded, or a part is missing")
    return error


def reads_damaged(folder: str) -> None:
    """Load every form under every damage, which rank 0 makes; print the damages that raised no error."""
    rank = mw.init_process().rank
    count, silent = 0, list[str]()
    for form in FORMS:
        good, bad = Path(folder, form), Path(folder, "bad")
        mw.save_state_dict(_state(zero=False), good, format=form)
        for name, harm in damage_kinds(good, FLIPS, CUTS).items():
            if name == f"no {CHECKSUMS}":
                continue  # then the file is like a foreign one, without checksums
            if rank == 0:
                shutil.rmtree(bad, ignore_errors=True)
                shutil.copytree(good, bad)
                harm(bad)
            _barrier()
            count += 1
            if _load_error(bad) is None:
                silent.append(f"{form}: {name}")
            _barrier()
    print(json.dumps({"count": count, "silent": silent}))


def _barrier() -> None:
    mesh = mw.ProcessMesh([0, 1], ["x"])
    mw.unshard_dtensor(mw.shard_tensor(torch.ones(2), mesh, [mw.Shard(0)]).sum()).item()


def _output_of_rank_0(ended: list[Ended]) -> Any:
    """Return the JSON that rank 0 printed. AssertionError if a rank failed."""
    for one in ended:
        assert one.status == 0, one.output[-1500:]
    return json.loads(ended[0].output.splitlines()[-1])


def damaged_files() -> Verdict:
    """Flips, truncation, missing, exchanged and foreign files in all three forms: every one is reported."""
    told = _output_of_rank_0(run_ranks("benchmarks._faults_reads:reads_damaged", 2, limit=LIMIT))
    return Verdict(
        not told["silent"], f"{told['count'] - len(told['silent'])} of {told['count']}; {told['silent'][:3]}"
    )


class _Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch run_by_a_checkpoint",)


def _hostile() -> dict[str, Callable[[Path], object]]:
    """Return every kind of hostile content of a folder, by name."""
    import pickle

    def put(name: str, data: bytes) -> Callable[[Path], object]:
        return lambda folder: (folder / name).write_bytes(data)

    def endless(name: str) -> Callable[[Path], object]:
        return lambda folder: os.symlink("/dev/zero", folder / name)

    return {
        "a place of 2 GB in the memo": put(".metadata", b"\x80\x02Nr\xff\xff\xff\x7f."),
        "code": put(".metadata", pickle.dumps(_Code())),
        "nested tuples as a key": put(".metadata", b"\x80\x02})" + b"\x85" * 300_000 + b"Ns."),
        "a text of 2**63 bytes": put(".metadata", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f"),
        "a list too many": put(".metadata", b"\x80\x02" + b"]" * 3_000_000 + b"."),
        "deep JSON": put("manifest.json", b"[" * 500_000),
        "wide JSON": put("manifest.json", b"[" + b"[]," * 5_000_000 + b"0]"),
        "a deep index": put("model.safetensors.index.json", b'{"a":' * 200_000),
        "a long header": put("model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
        "a deep header": put("model.safetensors", (500_000).to_bytes(8, "little") + b"[" * 500_000),
        "an endless shard": endless("model.safetensors"),
        "an endless manifest": endless("manifest.json"),
        "endless metadata": endless(".metadata"),
        "a manifest of a terabyte": lambda folder: os.truncate(os.open(folder / "manifest.json", 66, 0o600), 1 << 40),
    }


def reads_hostile(folder: str) -> None:
    """Load every hostile folder; print the growth of memory, the longest time, and the folders that were accepted."""
    mw.init_process()
    worst, accepted, rank = 0.0, list[str](), mw.get_rank()
    places = {name: Path(folder, f"{rank}.{n}") for n, name in enumerate(_hostile())}
    if os.fork() == 0:  # the memory that makes the files does not count as the reader's
        for name, make in _hostile().items():
            places[name].mkdir()
            make(places[name])
        os._exit(0)
    os.wait()
    before = _peak()
    for name, place in places.items():
        start = time.perf_counter()
        if _load_error_in_child(place) is None:
            accepted.append(name)
        worst = max(worst, time.perf_counter() - start)
    told = {"peak": _peak() - before, "worst": worst, "accepted": accepted}
    print(json.dumps(told | {"ran": os.path.exists("run_by_a_checkpoint")}))


def _load_error_in_child(path: Path) -> CheckpointError | None:
    from meshwright.checkpoint import open_checkpoint

    try:
        open_checkpoint(path)
    except CheckpointError as error:
        return error
    return None


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def hostile_files() -> Verdict:
    """Pickles with code, deep and wide JSON, huge sizes, links to devices: refused, below 100 MB, no code is run."""
    told = _output_of_rank_0(run_ranks("benchmarks._faults_reads:reads_hostile", 1, limit=LIMIT))
    good = not told["accepted"] and not told["ran"] and told["peak"] < LARGEST_PEAK
    return Verdict(
        good, f"{told['peak'] / 2**20:.0f} MiB at most, accepted {told['accepted']}", round(told["worst"], 2)
    )


def reads_another(folder: str) -> None:
    """Load into another model and optimizer; print the error of the load."""
    mw.init_process()
    mw.save_state_dict({**_state(zero=False), "old.bias": torch.ones(3), "i": torch.ones(2)}, Path(folder, "one"))
    state = _state(zero=True) | {
        "b": torch.zeros(8),
        "new.bias": torch.zeros(3),
        "i": torch.zeros(2, dtype=torch.int64),
    }
    text = ""
    try:
        mw.load_state_dict(state, Path(folder, "one"))
    except CheckpointError as error:
        text = str(error)
    report = mw.load_state_dict(state, Path(folder, "one"), strict=False)
    net = torch.nn.Linear(2, 2)
    adamw, other = torch.optim.AdamW(net.parameters()), ""
    mw.save_checkpoint(Path(folder, "run"), 1, net, adamw)
    try:
        mw.load_checkpoint(Path(folder, "run"), net, torch.optim.SGD(net.parameters(), lr=0.1))
    except CheckpointError as error:
        other = str(error)
    loaded = bool(state["w"].to_local().any())
    names = [*report.missing_keys, *report.unexpected_keys, *report.mismatched]
    print(json.dumps({"text": text, "names": names, "other": other, "loaded": loaded}))


def unfitting_states() -> Verdict:
    """Shape, dtype, renamed and missing keys are listed at once; strict=False reports them; AdamW is no SGD."""
    told = _output_of_rank_0(run_ranks("benchmarks._faults_reads:reads_another", 2, limit=LIMIT))
    wanted = {"b", "i", "old.bias", "new.bias"}
    listed = all(f"{name}: " in told["text"] for name in wanted) and "renamed?" in told["text"]
    other = "AdamW" in told["other"] and "SGD" in told["other"]
    good = listed and other and told["loaded"] and set(told["names"]) == wanted
    return Verdict(good, f"listed {listed}, reported {sorted(told['names'])}, other optimizer refused {other}")


def reads_dead(folder: str) -> None:
    """Load from a file system whose third read never returns on rank 1; then from a FIFO."""
    rank = mw.init_process().rank
    path = Path(folder, "one")
    mw.save_state_dict(_state(zero=False), path)
    real, count = os.preadv, iter(range(1, 1000))
    if rank == 1:
        os.preadv = lambda *args: threading.Event().wait() if next(count) == 3 else real(*args)
    start = time.perf_counter()
    first = _load_error(path)
    seconds = time.perf_counter() - start
    os.preadv = real
    if rank == 0:
        (path / "rank_00001.safetensors").unlink()
        os.mkfifo(path / "rank_00001.safetensors")
    _barrier()
    second = _load_error(path)
    told = [type(first).__name__, str(path) in str(first), "a FIFO" in str(second) or "rank_00001" in str(second)]
    print(json.dumps({"told": told, "seconds": seconds}), flush=True)
    os._exit(0)


def a_dead_file_system() -> Verdict:
    """A read that never returns on one rank: an error with the path on all ranks as soon as the limit is over."""
    each = {"MESHWRIGHT_READ_TIMEOUT": f"{READ_LIMIT:g}"}
    ended = run_ranks("benchmarks._faults_reads:reads_dead", 2, each=lambda _: each, limit=LIMIT)
    told = [json.loads(e.output.splitlines()[-1]) for e in ended]
    good = all(t["told"] == ["ReadTimeoutError", True, True] for t in told)
    seconds = round(max(t["seconds"] for t in told), 1)
    return Verdict(good and seconds < READ_LIMIT + 5, f"{told[0]['told']} with a limit of {READ_LIMIT:g} s", seconds)


ROWS = {7: damaged_files, 8: hostile_files, 9: unfitting_states, 29: a_dead_file_system}
