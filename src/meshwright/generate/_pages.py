"""Pages of a cache: which ones are free, and which ones each row has.

A page has the keys of `size` consecutive positions of a row. Rows with equal prompts share the pages that the prompt
fills whole, and no row writes to them. A row enters only if the pages that it may need at most are left, so rows that
are under way always find a free page. All ranks count the pages of all ranks, and so admit the same rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ._request import Prompt


@dataclass(frozen=True, slots=True)
class PagePool:
    """The pages of each rank with rows of its own: `count` pages of `size` positions, and a spare one.

    Page 0 is the spare one. A slot without a row writes there, and tables name it where a row has no page.
    """

    count: int
    size: int

    @property
    def positions(self) -> int:
        """Positions of all pages of a rank."""
        return (self.count + 1) * self.size


def page_count(positions: int, size: int) -> int:
    """Return the number of pages of this size for so many positions of a row."""
    return -(-positions // size)


@dataclass(frozen=True, slots=True)
class RowPages:
    """The pages of a row, in the order of its positions."""

    prompt: Prompt
    pages: list[int]
    filled: int
    """Number of the first pages that other rows had filled before this row entered."""
    most: int
    """Number of pages that the row may need."""


class Pages:
    """The pages of one rank."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.free = list(range(pool.count, 0, -1))
        self.rows: dict[int, RowPages] = {}
        self.holders: Counter[int] = Counter()
        """Number of the rows that have a page."""
        self.shared: dict[Prompt, list[int]] = {}
        """The pages that a prompt of some row fills whole."""
        self.refused: Prompt | None = None
        """The last prompt for which pages were missing, until a row leaves: slots without a row ask for each token."""

    @property
    def in_use(self) -> int:
        """Number of pages that rows have; a page of several rows counts once."""
        return self.pool.count - len(self.free)

    def enter(self, row: int, prompt: Prompt, positions: int) -> bool:
        """Give a row the pages of its prompt; False if the pages for `positions` are not left."""
        if prompt is self.refused:
            return False
        shared, most = self.shared.get(prompt, []), page_count(positions, self.pool.size)
        promised = sum(each.most - len(each.pages) for each in self.rows.values())
        if most - len(shared) > len(self.free) - promised:
            self.refused = prompt
            return False
        own = [self.free.pop() for _ in range(page_count(len(prompt), self.pool.size) - len(shared))]
        pages = [*shared, *own]
        self.rows[row] = RowPages(prompt, pages, len(shared), most)
        self.holders.update(pages)
        if whole := pages[: len(prompt) // self.pool.size]:
            self.shared[prompt] = whole
        return True

    def grow(self, row: int, position: int) -> bool:
        """Give a row the page of this position, the next one; True if the row did not have it."""
        pages = self.rows[row].pages
        if position < len(pages) * self.pool.size:
            return False
        pages.append(self.free.pop())
        self.holders.update(pages[-1:])
        return True

    def leave(self, row: int) -> None:
        """Make the pages of a row free, except those that other rows have."""
        left, self.refused = self.rows.pop(row), None
        self.holders.subtract(left.pages)
        unused = [page for page in left.pages if not self.holders[page]]
        self.free.extend(unused)
        if left.pages[0] in unused:
            self.shared.pop(left.prompt, None)
