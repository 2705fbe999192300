"""Show accounts of a training step: as text, as data for programs, and as one self-contained page."""

from meshwright.search import account_text as text

from ._data import data
from ._html import Markup, element, table
from ._model import account_of
from ._page import document, page
from ._show import Listing, Picture, ShowError, show

__all__ = [
    "Listing",
    "Markup",
    "Picture",
    "ShowError",
    "account_of",
    "data",
    "document",
    "element",
    "page",
    "show",
    "table",
    "text",
]
