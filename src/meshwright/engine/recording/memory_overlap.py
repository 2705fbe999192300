"""Checks for tensors that overlap in memory: a program may write in place only to memory that nothing else uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import Tensor

from meshwright.graph import Input, Pass
from meshwright.passes import InPlace
from meshwright.tensor import shared_memory

from .._errors import StaticError


def share_no_memory(held: Iterable[Any]) -> bool:
    """False if two of the tensors share elements."""
    tensors = list({id(x): x for x in held if isinstance(x, Tensor)}.values())
    return shared_memory(tensors, len(tensors)) == ([], [])


def check_no_overlap(inputs: Sequence[Input], given: Sequence[Any], written: Collection[int]) -> None:
    """Raise StaticError if the program writes to an input that shares elements with another input.

    A parameter or a state is written at the end of a step, so another input that is only read may share its memory.
    """
    places = sorted((at for at, x in enumerate(given) if isinstance(x, Tensor)), key=lambda at: at not in written)
    groups, pairs = shared_memory([given[at] for at in places], sum(at in written for at in places))
    for shared in (*groups, *pairs):
        for one, other in combinations([places[number] for number in shared], 2):
            if _is_unclear(inputs, written, one, other):
                raise _shared_error(*sorted((inputs[one], inputs[other]), key=lambda i: i.role != "batch"))


def _is_unclear(inputs: Sequence[Input], written: Collection[int], one: int, other: int) -> bool:
    """True if a write to one of two overlapping inputs may change the result of the step.

    The stages of a pipeline have inputs of their own for one buffer.
    """
    if (inputs[one].role, inputs[one].name) == (inputs[other].role, inputs[other].name) != ("constant", "constant"):
        return False
    both = one in written and other in written
    return both or any(at in written and inputs[at].role not in ("parameter", "state") for at in (one, other))


def _shared_error(one: Input, other: Input) -> StaticError:
    return StaticError(
        "dist_model(...)",
        f"{_described(one)} and {_described(other)}, which share memory, and the step writes to it",
        "a program reads each tensor as it is before the step, so a write to one would not change the other",
        "use one tensor for both, as in head.weight = embedding.weight, or replace one of them by its clone()",
    )


def _described(given: Input) -> str:
    is_attribute = (given.role, given.name) == ("constant", "constant")
    return "an attribute" if is_attribute else f"{given.role} {given.name}"


def without_inputs(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes for inputs that overlap in memory: no input is written over."""
    return tuple(replace(p, inputs=False) if isinstance(p, InPlace) else p for p in passes)
