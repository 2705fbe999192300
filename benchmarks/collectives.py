"""Cost model: median error of predicted collective times against published measurements.

`measured_collectives.json` has a row per measurement, with its source: bandwidths as nccl-tests counts them (the bytes
that a ring would have to move), for sizes from 32 KiB to 16 GiB. Its networks are links by name, or GB/s between two
nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from meshwright.cost import cluster_of, link_of

ROWS = Path(__file__).with_name("measured_collectives.json")
MEDIAN = 0.1
LARGE = 2**28
GIGA = 1e9


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the median error of the predicted times."""
    rows = json.loads(ROWS.read_text())
    off = {named(row): priced(row) / row["bus_gbs"] - 1 for row in rows}
    large = [abs(off[named(row)]) for row in rows if row["bytes"] >= LARGE]
    found = [abs(x) for x in off.values()]
    return {
        "name": "collectives",
        "value": round(median(found), 4),
        "goal": f"<= {MEDIAN} in the median of {len(found)} measurements",
        "ok": median(found) <= MEDIAN,
        "details": {
            "mean": round(mean(found), 4),
            "mean of 256 MiB and more": round(mean(large), 4),
            "worst of 256 MiB and more": round(max(large), 4),
            "off": {name: round(x, 4) for name, x in sorted(off.items(), key=lambda item: -abs(item[1]))[:12]},
        },
    }


def priced(row: Mapping[str, Any]) -> float:
    """Return the predicted bandwidth in GB/s."""
    cluster, network, n = cluster_of(row["device"]), row.get("network"), row["ranks"]
    if isinstance(network, str):
        cluster = replace(cluster, outside=link_of(network))
    elif network and cluster.outside:
        cluster = replace(cluster, outside=replace(cluster.outside, bandwidth=network * GIGA))
    seconds = float(cluster.meeting(row["kind"], row["bytes"], n, row["per_node"]))
    rounds = 2 if row["kind"] == "all-reduce" else 1
    return rounds * row["bytes"] * (n - 1) / n / seconds / GIGA


def named(row: Mapping[str, Any]) -> str:
    where = f"{row['ranks']} {row['device']}, {row['per_node']} a node"
    return f"{row['kind']} of {row['bytes'] // 1024} KiB, {where}"
