"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], numbers: Collection[str]) -> str:
    """Return the rows as text, columns two blanks apart; the first row has the names of the columns.

    The columns that `numbers` names are aligned right, the others left.
    """
    columns = [_aligned(column, column[0] in numbers) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _aligned(column: Sequence[str], right: bool) -> list[str]:
    """Return the cells of a column in one width."""
    width = max(map(len, column))
    return [cell.rjust(width) if right else cell.ljust(width) for cell in column]
