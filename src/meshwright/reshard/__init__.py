"""Conversions between layouts: steps as values, plans, search for the cheapest path, and execution."""

from ._assembly import away_part
from ._axis_conversions import (
    ROUNDS,
    AxisRole,
    CollectiveKind,
    collective_between,
    received_share,
    transposed,
)
from ._element_moves import ElementMoves, Where, element_moves
from ._errors import ReshardError
from ._execute import Halves, halves_of
from ._mover import Mover, OutMover
from ._parse import parse_step
from ._plan import ConversionPlan, Price, Purpose, execute, plan, prepare
from ._split import PreparedConversion
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
    "ElementMoves",
    "Exchange",
    "Fill",
    "Halves",
    "Mover",
    "OutMover",
    "Pad",
    "PreparedConversion",
    "Price",
    "Purpose",
    "ReduceScatter",
    "Relabel",
    "ReshardError",
    "Scale",
    "Slice",
    "View",
    "Where",
    "away_part",
    "collective_between",
    "element_moves",
    "execute",
    "halves_of",
    "parse_step",
    "plan",
    "prepare",
    "received_share",
    "transposed",
]
