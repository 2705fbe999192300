"""An account as plain data for `json.dumps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from meshwright.pipeline import Timeline
from meshwright.search import Account


def data(account: Account, measured: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the account for programs; numbers are seconds and bytes."""
    found: dict[str, Any] = {
        "what": account.what,
        "how": account.how,
        "where": account.where,
        "plan": dict(account.decided),
        "seconds": account.seconds,
        "bytes": account.nbytes,
        "memory_limit": account.memory_limit,
        "fits": account.fits,
        "why": list(account.why),
        "throughput": asdict(account.throughput) if account.throughput else None,
        "assumed": list(account.assumed),
        "changes": _rows(account.changes),
        "recipes": _rows(account.recipes),
        "spent": dict(account.spent),
        "held": {rank: dict(parts) for rank, parts in account.held.items()},
        "tensors": _rows(account.laid),
        "communications": _rows(account.sent),
        "instead": _rows(account.rivals),
        "memory": _rows(account.curves),
    }
    if account.timeline is not None:
        found["timeline"] = _timeline(account.timeline)
    return {**found, "measured": dict(measured)} if measured else found


def _rows(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "schedule": timeline.schedule.name,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "busy": list(timeline.busy),
        "rows": [[(str(t.action), t.start, t.end) for t in row] for row in timeline.rows],
    }
