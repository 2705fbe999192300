"""Choosing: the schedule of a pipeline, with a proof of how good it is."""

from ._bounds import lower_bound
from ._errors import SearchError
from ._find import Found, find_placement, find_schedule
from ._hints import hints
from ._problem import Objective, Problem

__all__ = [
    "Found",
    "Objective",
    "Problem",
    "SearchError",
    "find_placement",
    "find_schedule",
    "hints",
    "lower_bound",
]
