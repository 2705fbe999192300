"""An account as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from .account import Account, Communication, OtherPlan, TensorLayout
from .text_table import text_table
from .units import seconds, share, size

MOST = 40
"""Most rows of a table that are shown; the page shows all."""


def account_text(account: Account, measured: Mapping[str, float] | None = None) -> str:
    """Return the account as text: its parts in order, each with its table."""
    parts = [_head(account), _tensors(account), _sent(account), _spent(account), _held(account)]
    parts += [_measured(account, measured)] if measured else []
    parts.append(_lines("why", account.why))
    parts += [_lines("what this assumes", account.assumed)] if account.assumed else []
    parts += [_lines("what would change it", account.changes)] if account.changes else []
    parts += [_others("other plans", account.rivals, account.seconds)] if account.rivals else []
    parts += [_others("known recipes", account.recipes, account.seconds)] if account.recipes else []
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(account: Account) -> list[str]:
    return [account.what, *(f"  {line}" for line in (*account.opening, account.how, account.where))]


def _lines(title: str, lines: Iterable[object]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)]


def _tensors(account: Account) -> list[str]:
    rows = [(layer, row.name, row.layout, size(row.nbytes), row.note) for layer, row in _alike(account)]
    return _table("layouts of tensors", ("layer", "tensor", "layout", "per rank", ""), rows, {3})


def _alike(account: Account) -> Iterator[tuple[str, TensorLayout]]:
    """Yield one row for all tensors of one name and layout, with their first layer and the number of others."""
    found: dict[tuple[str, str], list[TensorLayout]] = {}
    for row in account.laid:
        found.setdefault((row.name, row.layout), []).append(row)
    for first, *others in found.values():
        yield (first.layer or "the model") + (f" and {len(others)} more" if others else ""), first


def _sent(account: Account) -> list[str]:
    if not account.sent:
        return ["no communication"]
    return _table("communications of a step", Communication.HEAD, [s.cells for s in account.sent], {4, 5, 6, 7})


def _spent(account: Account) -> list[str]:
    rows = [(name, seconds(s), share(s, account.seconds)) for name, s in account.spent.items()]
    return _table("seconds of a step by part", ("part", "seconds", "of the step"), rows, {1, 2})


def _held(account: Account) -> list[str]:
    kinds, rows = account.held_table()
    return _table("memory", ("rank", *kinds, "total"), rows, set(range(1, len(kinds) + 2)))


def _measured(account: Account, measured: Mapping[str, float]) -> list[str]:
    return _table(
        "predicted and measured", ("", "predicted", "measured", "off by"), beside(account, measured), {1, 2, 3}
    )


def _others(title: str, others: Iterable[OtherPlan], whole: float) -> list[str]:
    rows = [(r.how, f"{r.seconds / whole:.3f} x", size(r.nbytes), r.why) for r in others]
    return _table(title, ("plan", "step", "per rank", "compared with this plan"), rows, {1, 2})


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> list[str]:
    """Return the lines of a table with its title; numbers are aligned right, texts left."""
    every = [tuple(row) for row in rows]
    lines = text_table([tuple(head), *every[:MOST]], numbers)
    more = [f"  and {len(every) - MOST} more"] if len(every) > MOST else []
    return [title, *(f"  {line}" for line in lines), *more]


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
