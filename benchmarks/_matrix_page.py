"""The table of the matrix as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = """# Models that others wrote

This page shows which models of `transformers` and `diffusers` train in which settings. The models are unmodified, with
small sizes and random weights. Each cell runs three steps of AdamW on simulated ranks, and compares them with the same
steps on one device. A cell is right if the relative difference of every loss and every gradient is at most 1e-5. Some
models amplify roundings: if a change of each weight by one rounding changes the results of one device by d, a cell is
also right up to 4 d.

`python -m benchmarks.matrix --page docs/matrix.md` measures the table and writes this page; the cells took {seconds} s.

* "tp" shards weights by one rule for all models. "cp" shards batches along the sequence. "ep" shards weights of experts
  along their first dim. "pp" divides the layers over two stages. "auto" is the plan of the search.
* e is eager mode, and s is a static program. In eager mode, the calls of all ranks are compared as between processes.
* "refused" is an error of four parts that says what to write instead. "bug" is any other error. "slow" is a cell that
  took more than 150 s. "–" is a setting that does not apply to the model. An empty cell was not measured.

The cells were measured one after the other, with different versions of the code. `benchmarks/matrix.json` keeps them.
Without that file, `make matrix` measures all cells again.

"""
SHOWN = {"ok": "yes", "n/a": "–"}


def page(figure: Mapping[str, Any]) -> str:
    """Return the page of a figure: one row per model, one column per setting and mode, and the failures below."""
    details = figure["details"]
    table: Mapping[str, Mapping[str, Any]] = details["table"]
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    heads = [f"{setting} {mode[0]}" for setting, _, mode in (c.rpartition(" ") for c in columns)]
    rows = [["", *heads], ["---"] * (len(columns) + 1)]
    rows += [[name, *(_shown(row.get(c)) for c in columns)] for name, row in table.items()]
    counts = ", ".join(f"{n} {verdict}" for verdict, n in details["verdicts"].items())
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return HEAD.format(seconds=details["seconds"]) + "\n".join([*lines, "", f"{counts}.", "", *_reasons(table), ""])


def _shown(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else SHOWN.get(found["verdict"], f"**{found['verdict']}**")


def _reasons(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each reason, with the cells that it applies to."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name, row in table.items():
        for column, found in row.items():
            if found["verdict"] != "ok":
                who = column if found["verdict"] == "n/a" else f"{name} {column}"
                cells.setdefault((found["verdict"], found.get("why", "")), []).append(who)
    return [
        f"* {verdict}: {', '.join(dict.fromkeys(where))}: `{why}`" if why else f"* {verdict}: {', '.join(where)}"
        for (verdict, why), where in cells.items()
    ]
