"""Pages of a cache: which ones are free, and which ones each row has.

A page has the keys of `size` consecutive positions of a row. Rows with equal prompts share the pages that the prompt
fills whole, and no row writes to them. A row enters only if the pages that it may need at most are left, so rows that
are under way always find a free page. All ranks count the pages of all ranks, and so admit the same rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ._errors import GenerationError
from ._request import GenerationRequest, Prompt
from ._rows import Rows

PAGE_SIZE = 64
"""Positions of a page, if a request has `cache_positions` only."""


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

    def pages_of(self, positions: int) -> int:
        """Return the number of pages for so many positions of a row."""
        return -(-positions // self.size)


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

    @property
    def in_use(self) -> int:
        """Number of pages that rows have; a page of several rows counts once."""
        return self.pool.count - len(self.free)

    def enter(self, row: int, prompt: Prompt, positions: int) -> bool:
        """Give a row the pages of its prompt; False if the pages for `positions` are not left."""
        shared, most = self.shared.get(prompt, []), self.pool.pages_of(positions)
        promised = sum(each.most - len(each.pages) for each in self.rows.values())
        if most - len(shared) > len(self.free) - promised:
            return False
        own = [self.free.pop() for _ in range(self.pool.pages_of(len(prompt)) - len(shared))]
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
        left = self.rows.pop(row)
        self.holders.subtract(left.pages)
        unused = [page for page in left.pages if not self.holders[page]]
        self.free.extend(unused)
        if left.pages[0] in unused:
            self.shared.pop(left.prompt, None)


def refuse_pages(request: GenerationRequest, found: str) -> None:
    """Raise GenerationError if the request is for pages. `found` says why no decode step fits."""
    if not request.is_paged:
        return
    options = {"page_size": request.page_size, "cache_positions": request.cache_positions}
    given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    raise GenerationError(
        f"tokens with {given}",
        found,
        "pages hold the keys and values of decoders of transformers whose layers keep all positions",
        "leave page_size and cache_positions out",
    )


def pool_of(request: GenerationRequest, rows: Rows, capacity: int) -> PagePool | None:
    """Return the pages for a request with rows of this capacity; None for a request without pages.

    Raises:
        GenerationError: the pages of a rank are too few for one row.
    """
    if not request.is_paged:
        return None
    pool = PagePool(0, request.page_size or PAGE_SIZE)
    ranks = rows.count // rows.held
    if request.cache_positions is None:
        return PagePool(rows.held * pool.pages_of(capacity), pool.size)
    pool = PagePool(pool.pages_of(-(-request.cache_positions // ranks)), pool.size)
    least = pool.pages_of(request.positions)
    if pool.count < least:
        longest = max(map(len, request.prompts))
        raise GenerationError(
            f"tokens with cache_positions={request.cache_positions}",
            f"a prompt of {longest} tokens and {request.max_new_tokens} new ones, which need {least} pages of "
            f"{pool.size} positions",
            f"each rank with rows of its own has {pool.count}, on {ranks} of these ranks",
            f"pass cache_positions={least * pool.size * ranks} or more",
        )
    return pool
