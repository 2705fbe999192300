"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """Return the lines of a table, columns two blanks apart; the columns in `numbers` are aligned right.

    >>> text_table([("name", "bytes"), ("weight", "8")], {1})
    ['name    bytes', 'weight      8']
    """
    columns = [_aligned(column, at in numbers) for at, column in enumerate(zip(*rows, strict=True))]
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _aligned(column: Sequence[str], right: bool) -> list[str]:
    """Return the cells of a column in one width."""
    width = max(map(len, column))
    return [cell.rjust(width) if right else cell.ljust(width) for cell in column]
