"""Show accounts of a training step: as text, as data for programs, and as one self-contained page."""

from meshwright.search import account_text as text

from ._data import data
from ._model import account_of
from ._page import page
from ._show import Listing, Picture, ShowError, show

__all__ = ["Listing", "Picture", "ShowError", "account_of", "data", "page", "show", "text"]
