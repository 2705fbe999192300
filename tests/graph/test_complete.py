"""Layouts completed from marks, forward, backward and by cost, as a table that parses back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.graph import ProgramError, capture, complete, parse_layouts, record_gradients, with_layouts
from meshwright.layout import parse_spec
from meshwright.models import Llama, LlamaConfig

MESH = mw.ProcessMesh(np.arange(4).reshape(2, 2), ["dp", "tp"])
R = mw.Replicate()
SMALL = LlamaConfig(vocab=32, hidden=32, layers=2, heads=4, kv_heads=4, feed_forward=48)


@pytest.fixture(autouse=True)
def ranks() -> Generator[None]:
    with using_communicator(PeerlessCommunicator(0, 4)):
        yield


def layouts(model: nn.Module, call: Callable[..., Any], *batch: Tensor) -> dict[str, str]:
    found = complete(capture(model, call, batch).program)
    return {name: repr(spec) for name, spec in found.specs.items()}


def test_a_mark_reaches_earlier_and_later_values() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    reshard = mw.reshard  # looked up before the capture: an import during it may draw random numbers

    def call(x: Tensor) -> Tensor:
        hidden = reshard(model[0](x), MESH, [mw.Shard(0), mw.Shard(1)])
        return model[2](model[1](hidden))

    found = layouts(model, call, torch.zeros(8, 8))
    assert found["batch_0"] == "f32[8@dp, 8]"
    assert (found["0_weight"], found["0_bias"]) == ("f32[16@tp, 8]", "f32[16@tp]")
    assert (found["2_weight"], found["2_bias"]) == ("f32[4, 16@tp]", "f32[4]")
    assert found["linear_1"] == "f32[8@dp, 4] +tp"


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_marks_propagate_through_random_operators(drop: float) -> None:
    """Dropout between two matrices, and inside of attention: sharded as without it."""
    q, out, up, down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
    model = nn.ModuleDict({"q": q, "out": out, "up": up, "down": down})
    for layer in (q, up):
        layer.weight = mw.shard_tensor(layer.weight, MESH, [R, mw.Shard(0)])

    def call(x: Tensor) -> Tensor:
        heads = q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=drop, is_causal=True)
        return down(nn.functional.dropout(up(out(seen.transpose(1, 2).flatten(2))), drop))

    found = layouts(model, call, torch.zeros(2, 6, 8))
    assert (found["out_weight"], found["down_weight"]) == ("f32[8, 8@tp]", "f32[8, 16@tp]")
    assert found["linear_3"] == "f32[2, 6, 8] +tp"


def test_marks_of_first_matrices_decide_the_layout_of_second_ones() -> None:
    model = Llama(SMALL)
    for block in model.blocks:
        for layer in (block.attention.q, block.attention.k, block.attention.v, block.feed_forward.gate):
            layer.weight = mw.shard_tensor(layer.weight, MESH, [R, mw.Shard(0)])
    tokens = mw.shard_tensor(torch.zeros(4, 8, dtype=torch.long), MESH, [mw.Shard(0)])
    found = layouts(model, model, tokens, tokens.clone())
    assert found["blocks_1_attention_o_weight"] == "f32[32, 32@tp]"
    assert found["blocks_1_feed_forward_up_weight"] == "f32[48@tp, 32]"
    assert found["blocks_1_feed_forward_down_weight"] == "f32[32, 48@tp]"
    assert found["exit_norm_weight"] == "f32[32]"


def test_a_conflict_is_settled_by_bytes_and_not_by_order() -> None:
    class Twice(nn.Module):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.table, self.first = nn.Parameter(torch.zeros(64, 8)), first

        def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
            """Return the products of the table with an operand sharded by rows, and with two sharded by columns."""
            uses = [lambda: rows * self.table, lambda: columns * self.table, lambda: columns + self.table]
            order = uses[self.first :] + uses[: self.first]
            a, b, c = (use() for use in order)
            return a.sum() + b.sum() + c.sum()

    for first in range(3):
        model = Twice(first)
        rows = mw.shard_tensor(torch.zeros(64, 8), MESH, [R, mw.Shard(0)])
        columns = mw.shard_tensor(torch.zeros(64, 8), MESH, [R, mw.Shard(1)])
        assert layouts(model, model, rows, columns)["table"] == "f32[64, 8@tp]"


def test_values_without_a_mark_are_replicated() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["a"].weight = mw.shard_tensor(model["a"].weight, MESH, [R, mw.Shard(0)])
    found = complete(capture(model, lambda x, y: (model["a"](x), model["b"](y)), [torch.zeros(2, 4)] * 2).program)
    assert repr(found.specs["b_weight"]) == "f32[4, 4]"
    assert found.reasons["b_weight"] == "default"


def test_the_table_parses_back_and_may_be_edited() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].weight = mw.shard_tensor(model[0].weight, MESH, [R, mw.Shard(0)])
    program = capture(model, model, [torch.zeros(8, 8)]).program
    found = complete(program)
    assert parse_layouts(str(found), MESH) == dict(found.specs)
    edited = str(found).replace("f32[4, 16@tp]", "f32[4, 16]   ")
    assert repr(complete(program, parse_layouts(edited, MESH)).specs["1_weight"]) == "f32[4, 16]"


def test_a_line_without_a_spec_is_refused() -> None:
    with pytest.raises(ProgramError, match="line 2"):
        parse_layouts("x  f32[4]\ny", MESH)


def test_recorded_programs_have_the_completed_layouts() -> None:
    """Recorded results have the layouts that completion predicts."""
    model = Llama(SMALL)
    for block in model.blocks:
        for layer in (block.attention.q, block.attention.k, block.attention.v):
            layer.weight = mw.shard_tensor(layer.weight, MESH, [R, mw.Shard(0)])
    tokens = mw.shard_tensor(torch.zeros(4, 8, dtype=torch.long), MESH, [mw.Shard(0)])
    captured = capture(model, model, [tokens, tokens.clone()])
    found = complete(captured.program)
    laid = with_layouts(captured.program, found)
    assert laid.layouts.specs == found.specs
    from dataclasses import replace

    program = record_gradients(replace(captured, program=laid), 0, 4)
    inputs = {i.name: i.spec for i in program.inputs if i.role == "parameter"}
    assert {n.replace(".", "_"): s for n, s in inputs.items()}.items() <= found.specs.items()


def test_specs_of_text() -> None:
    assert parse_layouts("w  f32[8@dp, 4]  # mark", MESH) == {"w": parse_spec("f32[8@dp, 4]", MESH)}
