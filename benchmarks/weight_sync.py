"""Weights of a trainer in the layouts of a sampler: bytes by the lower bound, memory by the cap, and seconds.

A language model of 16 million parameters is trained and sampled from on 4 processes, in 16 pairs of layouts: on one
mesh, on meshes with other axes, and on disjoint ranks. The trainer's weights change, and `mw.weights.sync` brings them
to the sampler. The bytes that each rank receives are compared with the lower bound for any algorithm. The extra memory
counts the tensors that a rank allocates, with the messages that it receives, and without the sampler's weights. The
rival gathers each tensor whole on every rank, and copies the part of the sampler out of it. Both take turns, and the
seconds are medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
from benchmarks._reshard_bound import lower_bound
from meshwright.comm import launch

RANKS, TURNS = 4, 5
WIDTH, HIDDEN, WORDS, LAYERS = 510, 1374, 4096, 4  # 510 and 1374 rows are not even on 4 ranks
CAP = 4 << 20
SQUARE, LINE = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), mw.ProcessMesh(range(RANKS), ["tp"])
FIRST, SECOND = mw.ProcessMesh([0, 1], ["tp"]), mw.ProcessMesh([2, 3], ["tp"])
ROWS = {"embed", "q", "k", "v", "up", "gate", "head"}
"""Names of the weights that tensor parallelism shards along dim 0; it shards matrices with other names along dim 1."""

Place = Callable[[str, int], tuple[mw.ProcessMesh, list[mw.Placement]]]
"""Function from the name and the dims of a weight to its placements."""


def tensor_parallel(mesh: mw.ProcessMesh) -> Place:
    def place(name: str, ndim: int) -> tuple[mw.ProcessMesh, list[mw.Placement]]:
        one = mw.Replicate() if ndim == 1 else mw.Shard(0 if name in ROWS else 1)
        return mesh, [*[mw.Replicate()] * (mesh.ndim - 1), one]

    return place


def all_rows(name: str, ndim: int) -> tuple[mw.ProcessMesh, list[mw.Placement]]:
    return LINE, [mw.Shard(0)]


def rows_and_tensor_parallel(name: str, ndim: int) -> tuple[mw.ProcessMesh, list[mw.Placement]]:
    return SQUARE, [mw.Shard(0), *tensor_parallel(SQUARE)(name, ndim)[1][1:]]


def whole(name: str, ndim: int) -> tuple[mw.ProcessMesh, list[mw.Placement]]:
    return LINE, [mw.Replicate()]


TRAINED: dict[str, Place] = {
    "dp 2 x tp 2": tensor_parallel(SQUARE),
    "ZeRO-3": all_rows,
    "ZeRO-3 x tp 2": rows_and_tensor_parallel,
    "tp 2 on ranks 0, 1": tensor_parallel(FIRST),
}
SAMPLED: dict[str, Place] = {
    "tp 4": tensor_parallel(LINE),
    "dp 4": whole,
    "dp 2 x tp 2": tensor_parallel(SQUARE),
    "tp 2 on ranks 2, 3": tensor_parallel(SECOND),
}
PAIRS = [f"{trained} -> {sampled}" for trained, sampled in product(TRAINED, SAMPLED)]
QUICK = PAIRS[:2]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the pairs above the lower bound or the cap, and the time beside gathering one by one."""
    pairs = QUICK if quick else PAIRS
    with tempfile.TemporaryDirectory() as folder:
        code = launch(["-m", "benchmarks.weight_sync", folder, *pairs], RANKS, timeout=1200)
        if code:
            raise RuntimeError(f"a rank failed with status {code}")
        ranks = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]
    rows = {pair: summary([rank[pair] for rank in ranks]) for pair in pairs}
    above = [pair for pair, row in rows.items() if row["bytes above the bound"]]
    over = [pair for pair, row in rows.items() if row["extra memory"] > CAP]
    wrong = [pair for pair, row in rows.items() if not row["equal"]]
    ratios = [row["seconds"]["sync"] / row["seconds"]["one by one"] for row in rows.values()]
    return {
        "name": "weight_sync",
        "value": {
            "pairs above the lower bound": len(above),
            "extra memory / cap": round(max(row["extra memory"] for row in rows.values()) / CAP, 3),
            "time / gathering one by one": round(statistics.median(ratios), 3),
        },
        "goal": f"bytes received = the lower bound for each rank of {len(PAIRS)} pairs; extra memory at most the cap",
        "ok": not above and not over and not wrong,
        "details": {"MiB of the cap": CAP >> 20, "ranks": RANKS, "pairs": rows, "wrong values": wrong},
    }


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a pair from those of its ranks."""
    return {
        "MiB received": [round(rank["received"] / 2**20, 2) for rank in ranks],
        "bytes above the bound": sum(rank["received"] - rank["bound"] for rank in ranks),
        "extra memory": max(rank["extra"] for rank in ranks),
        "seconds": {way: max(rank["seconds"][way] for rank in ranks) for way in ("sync", "one by one")},
        "exchanges": ranks[0]["rounds"],
        "shared tensors": ranks[0]["shared"],
        "equal": all(rank["equal"] for rank in ranks),
    }


class Allocated(TorchDispatchMode):
    """Mode that counts the bytes of living tensors that were made inside, other than views of older ones."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, Tensor) and x.device.type == "cpu" else None
            if storage is not None and storage.data_ptr() not in before | self.held.keys():
                self.held[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage.data_ptr(), 0)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


def make(place: Place, device: str = "cpu") -> nn.Module:
    """Return the model with its weights distributed."""
    torch.manual_seed(0)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (HIDDEN, WIDTH), "gate": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "norm": (WIDTH,)}
    parts = [shapes] * LAYERS + [{"embed": (WORDS, WIDTH), "head": (WORDS, WIDTH), "scale": (WIDTH,)}]
    model = nn.ModuleList()
    for names in parts:
        layer = nn.ParameterDict()
        for name, shape in names.items():
            mesh, placements = place(name, len(shape))
            layer[name] = mw.shard_tensor(nn.Parameter(torch.randn(shape, device=device)), mesh, placements)
        model.append(layer)
    return model


def one_by_one(trainer: nn.Module, sampler: nn.Module) -> None:
    """Gather each tensor whole on every rank, and copy the sampler's part out of it."""
    with torch.no_grad():
        for source, target in zip(trainer.parameters(), sampler.parameters(), strict=True):
            gathered: Any = mw.unshard_dtensor(source.detach())
            into: Any = target
            into.copy_(mw.shard_tensor(gathered, into.mesh, into.placements))


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)


def allocated(act: Callable[[], object]) -> int:
    """Return the peak of the memory that the call allocates."""
    with Allocated() as mode:
        act()
    return mode.peak


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measured(trained: str, sampled: str) -> dict[str, Any]:
    """Return the numbers of this rank for a pair of layouts."""
    trainer, sampler, rival = make(TRAINED[trained]), make(SAMPLED[sampled], "meta"), make(SAMPLED[sampled])
    mw.weights.sync(trainer, sampler, memory_cap=CAP)
    change(trainer)
    found = mw.weights.sync(trainer, sampler, memory_cap=CAP)
    pairs = zip(trainer.parameters(), sampler.parameters(), strict=True)
    specs: list[tuple[Any, Any]] = [(source, target) for source, target in pairs]
    bound = sum(lower_bound(a.spec, b.spec, mw.get_rank()) for a, b in specs)
    equal = all(torch.equal(mw.unshard_dtensor(a.detach()), mw.unshard_dtensor(b.detach())) for a, b in specs)
    change(trainer)
    extra = allocated(lambda: mw.weights.sync(trainer, sampler, memory_cap=CAP))
    times: dict[str, list[float]] = {"sync": [], "one by one": []}
    for _ in range(TURNS):
        change(trainer)
        times["sync"].append(seconds_of(lambda: mw.weights.sync(trainer, sampler, memory_cap=CAP)))
        times["one by one"].append(seconds_of(lambda: one_by_one(trainer, rival)))
    return {
        "received": found.received,
        "bound": bound,
        "rounds": found.rounds,
        "shared": len(found.shared),
        "extra": extra,
        "seconds": {way: round(statistics.median(each), 4) for way, each in times.items()},
        "equal": equal,
    }


def work(folder: Path, pairs: list[str]) -> None:
    """Measure the pairs on this rank, and write its numbers."""
    torch.set_num_threads(1)
    mw.init_process()
    rows = {pair: measured(*pair.split(" -> ")) for pair in pairs}
    (folder / str(mw.get_rank())).write_text(json.dumps(rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), sys.argv[2:])
    else:
        print(json.dumps(run(), indent=1))
