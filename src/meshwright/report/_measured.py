"""Compare predicted with measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.search import Account, seconds, size


def beside(account: Account, measured: Mapping[str, float]) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows (name, predicted, measured, difference) of `seconds`, `bytes`, and the parts of the step by name."""
    told = {"seconds": account.seconds, "bytes": account.nbytes, **account.spent}
    for name, value in measured.items():
        shown = size if name == "bytes" else seconds
        own = told.get(name)
        if own is None:
            yield name, "-", f"{value:.4g}", "-"
        else:
            yield name, shown(own), shown(value), f"{100 * (own / value - 1):+.1f} %" if value else "-"
