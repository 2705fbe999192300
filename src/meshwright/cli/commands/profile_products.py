"""`meshwright profile --products`: the fastest products of quantized layers on this processor."""

from __future__ import annotations

import argparse

from meshwright.cli.console.exit_codes import OK
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.quantize import MostRows, keep_rows, measure_rows
from meshwright.search import progress_bar

ABOUT = "the products of quantized layers, for 1 to 512 rows, by the kernels of this library and by torch; about 10 s"


def measure_products(settings: argparse.Namespace) -> int:
    """Measure, print and keep the table of the products of quantized layers."""
    if settings.out or settings.ranks:
        raise UsageError("meshwright profile --products: with --out or --ranks\n  fix: leave out --out and --ranks")
    if settings.dry_run:
        print_json({"measurements": ABOUT}) if settings.json else print_text(ABOUT)
        return OK
    with progress_bar("measuring") as on_step:
        rows = measure_rows(on_step)
    path = keep_rows(rows)
    if settings.json:
        print_json({"most_rows": rows.shown(), "kept_in": None if path is None else str(path)})
    else:
        print_text(text(rows, "not kept: there is no folder to write to" if path is None else f"kept in {path}"))
    return OK


def text(rows: MostRows, end: str) -> str:
    """Return the table in words."""
    told = rows.shown()
    return "\n".join(
        (
            "the kernels of this library are faster than torch up to this number of rows of the inputs:",
            f"  packed weights, inputs in float32        {told['codes']}",
            f"  packed weights, inputs in half precision {told['half']}",
            f"  int8 weights and int8 inputs             {told['integers']}",
            end,
        )
    )
