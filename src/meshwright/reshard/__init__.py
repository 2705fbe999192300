"""Conversions between layouts: steps as values, plans, search for the cheapest path, and execution."""

from ._axis_conversions import (
    ROUNDS,
    AxisRole,
    CollectiveKind,
    collective_between,
    received_share,
    transposed,
)
from ._errors import ReshardError
from ._execute import Halves, Mover, away_part, halves_of
from ._parse import parse_step
from ._plan import ConversionPlan, Price, Purpose, execute, plan
from ._steps import (
    AllGather,
    AllReduce,
    AllToAll,
    ConversionStep,
    Exchange,
    Fill,
    Pad,
    ReduceScatter,
    Relabel,
    Scale,
    Slice,
    View,
)

__all__ = [
    "ROUNDS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AxisRole",
    "CollectiveKind",
    "ConversionPlan",
    "ConversionStep",
    "Exchange",
    "Fill",
    "Halves",
    "Mover",
    "Pad",
    "Price",
    "Purpose",
    "ReduceScatter",
    "Relabel",
    "ReshardError",
    "Scale",
    "Slice",
    "View",
    "away_part",
    "collective_between",
    "execute",
    "halves_of",
    "parse_step",
    "plan",
    "received_share",
    "transposed",
]
