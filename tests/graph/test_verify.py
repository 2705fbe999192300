"""Each kind of invalid program raises an error that names the place, the value and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.graph import Node, ProgramError, Value, verify
from tests.passes.random_programs import program

aten = torch.ops.aten


def doubled(add: Any, x: Value) -> Any:
    y = add(aten.add.Tensor, x, x)
    return y, [(x, y)]


MADE = program(doubled, (2, 2))
(NODE,) = MADE.nodes
(INPUT, RESULT) = (MADE.inputs[0].value, MADE.nodes[0].outs[0])
OTHER = replace(RESULT, name="other")
LONGER = replace(RESULT, name="longer", shape=(3, 2))


@pytest.mark.parametrize(
    ("broken", "found", "why"),
    [
        ({"nodes": (NODE, NODE)}, repr(RESULT), "it is computed twice"),
        ({"nodes": ()}, repr(RESULT), "no node computes it"),
        ({"nodes": (replace(NODE, args=(OTHER, OTHER)),)}, repr(OTHER), "it is read before it is computed"),
        ({"writes": ((INPUT, OTHER),)}, repr(OTHER), "a write must assign a value of the program to an input"),
        ({"writes": ((RESULT, RESULT),)}, repr(RESULT), "a write must assign a value of the program to an input"),
        ({"nodes": (replace(NODE, out=(RESULT, OTHER)),)}, "1 results", "the operator returns 1, the node has 2"),
        (
            {"nodes": (replace(NODE, out=LONGER),), "outputs": LONGER, "writes": ()},
            "f32[3, 2]",
            "the operator returns f32[2, 2]",
        ),
        (
            {"nodes": (replace(NODE, out=LONGER),), "outputs": LONGER, "writes": ((INPUT, LONGER),)},
            "into",
            "an input must keep its shape and dtype",
        ),
    ],
)
def test_an_invalid_program_is_an_error(broken: dict[str, Any], found: str, why: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify(replace(MADE, **broken), deep=True)
    assert found in caught.value.found
    assert why in caught.value.why


def test_a_valid_program_is_returned() -> None:
    assert verify(MADE, deep=True) is MADE


def test_a_missing_operand_of_an_operator_in_place_is_an_error() -> None:
    write = Node(torch.ops.aten.add_.Tensor, (OTHER, INPUT), {}, replace(RESULT, name="written"))
    with pytest.raises(ProgramError) as caught:
        verify(replace(MADE, nodes=(*MADE.nodes, write)))
    assert caught.value.why == "it is read before it is computed"
