"""A program run node by node: each input gets its own value, whatever its name."""

from __future__ import annotations

import pytest
import torch

from meshwright.graph import Input, Node, Program, Value, runner


@pytest.mark.parametrize("name", ["slice", "sum", "x", "input.weight"])
def test_inputs_may_have_names_of_built_ins(name: str) -> None:
    """torch.fx gives an input `slice` another name, which must not be the name of the next input."""
    first, second, out = (Value(n, (2,), torch.float32) for n in (name, f"{name}_1", "out"))
    inputs = Input(first, "saved", first.name), Input(second, "saved", second.name)
    program = Program(inputs, (Node(torch.ops.aten.sub.Tensor, (first, second), {}, out),), out)
    found, _ = runner(program)(torch.tensor([5.0, 7.0]), torch.tensor([1.0, 2.0]))
    assert found.tolist() == [4.0, 5.0]
