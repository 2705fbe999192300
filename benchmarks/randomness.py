"""Cost of a random operator per rank: dropout on a sharded tensor, for each source of randomness.

Nothing is sent: this is one rank under the peerless communicator. Times are nanoseconds per element of the rank's own
part, in dropout's forward call; "plain" is torch's dropout on a plain tensor of that part's size.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.overhead import in_turns

RANKS, SHAPE = 8, (1024, 1024)
SOURCES = ("torch", "counter", "rank")


def drops(ranks: int) -> dict[str, Callable[[], Any]]:
    """Return dropout by each source on rank 0's part of the tensor, and on a plain tensor of its size."""
    import meshwright as mw

    rows = -(-SHAPE[0] // ranks)
    x = mw.shard_tensor(torch.ones(SHAPE), mw.ProcessMesh(range(ranks), ["x"]), [mw.Shard(0)])

    def drop(source: Any) -> Callable[[], Any]:
        def once() -> None:
            with mw.random_source(source):
                F.dropout(x, 0.1)

        return once

    plain = torch.ones(rows, SHAPE[1])
    return {source: drop(source) for source in SOURCES} | {"plain": lambda: F.dropout(plain, 0.1)}


def nanoseconds(ranks: int, turns: int) -> dict[str, float]:
    """Return median nanoseconds per element of the part of one of `ranks` ranks."""
    from meshwright.comm import PeerlessCommunicator, using_communicator

    elements = SHAPE[0] // ranks * SHAPE[1]
    with using_communicator(PeerlessCommunicator(0, ranks)), torch.no_grad():
        times = in_turns(drops(ranks), turns, 1)
    return {name: round(statistics.median(t) / elements * 1e9, 1) for name, t in times.items()}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: nanoseconds per element on each of 8 ranks, by source."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        by_ranks = {ranks: nanoseconds(ranks, 5 if quick else 40) for ranks in (2, RANKS, 64)}
    finally:
        torch.set_num_threads(threads)
    return {
        "name": "randomness",
        "value": by_ranks[RANKS],
        "goal": None,
        "ok": True,
        "details": {"shape": SHAPE, "ranks": RANKS, "unit": "ns per local element", "by_ranks": by_ranks},
    }


if __name__ == "__main__":
    print(json.dumps(run()))
