"""Accounts to look at: as text, as data for programs, and as one page that needs nothing else."""

from ._data import data
from ._model import account_of
from ._page import page
from ._text import text

__all__ = ["account_of", "data", "page", "text"]
