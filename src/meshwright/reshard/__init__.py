"""Conversions between layouts: steps as values, plans, search for the cheapest path, and execution."""

from ._bound import lower_bound
from ._errors import ReshardError
from ._execute import Halves, Mover, away_part, halves_of
from ._parse import parse_step
from ._plan import Plan, Price, Purpose, execute, plan, transposed
from ._steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Fill,
    Pad,
    ReduceScatter,
    Relabel,
    Scale,
    Slice,
    Step,
    View,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Exchange",
    "Fill",
    "Halves",
    "Mover",
    "Pad",
    "Plan",
    "Price",
    "Purpose",
    "ReduceScatter",
    "Relabel",
    "ReshardError",
    "Scale",
    "Slice",
    "Step",
    "View",
    "away_part",
    "execute",
    "halves_of",
    "lower_bound",
    "parse_step",
    "plan",
    "transposed",
]
