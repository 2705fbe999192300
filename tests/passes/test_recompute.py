"""Recompute: the same bits, less memory between the passes, and nothing is drawn or sent twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.graph import RewriteError, communication, count_ops, is_random_operator, live_memory
from meshwright.passes import Recompute
from meshwright.passes.memory.recompute import _SavedValues

from .steps import Step, assert_same, llama_step, recorded

BLOCKS = ("blocks.*",)


@pytest.mark.parametrize(
    "change",
    [
        Recompute(BLOCKS),
        Recompute(("blocks.*.feed_forward", "exit")),
        Recompute(budget=0.5),
        Recompute(budget=0.0),
        Recompute(("blocks.1",), budget=0.3),
    ],
)
def test_the_numbers_stay(change: Recompute) -> None:
    step = llama_step((1, 1, 1))
    programs = step.changed(change)
    assert_same(step, programs)
    before, after = (live_memory(p).peak_in("forward", "backward") for p in (step.programs[0], programs[0]))
    assert programs[0].changes[-1].saved == {"bytes": before - after}


@pytest.mark.parametrize("change", [Recompute(BLOCKS), Recompute(BLOCKS, communication=True), Recompute(budget=0.3)])
def test_the_numbers_stay_on_many_ranks(change: Recompute) -> None:
    step = llama_step()
    assert_same(step, step.changed(change))


def test_recomputed_operators_have_valid_inputs() -> None:
    Recompute(BLOCKS)(llama_step((1, 1, 1)).programs[0], deep=True)


def test_a_block_saves_only_its_inputs() -> None:
    step = llama_step((1, 1, 1))
    (program,) = step.changed(Recompute(BLOCKS))
    saved = _SavedValues(program, Recompute(BLOCKS))
    inside = [root for root in saved.kept if saved.layers.get(root) is not None]
    # the sum at the end of the first block is the input of the second one; that of the second one, of the norm after it
    assert sorted(map(str, (saved.layers[root] for root in inside))) == ["blocks.0", "blocks.1"]
    whole, less = (live_memory(p).peak_in("forward", "backward") for p in (step.programs[0], program))
    assert less < 0.8 * whole


def test_communication_is_not_repeated_unless_allowed() -> None:
    step = llama_step((1, 2, 2))
    count = [len(list(communication(p))) for p in step.programs]
    assert [len(list(communication(p))) for p in step.changed(Recompute(BLOCKS))] == count
    inside = [n for n in communication(step.programs[0], "forward") if n.origin.layer.startswith("blocks.")]
    again = step.changed(Recompute(BLOCKS, communication=True))
    assert [len(list(communication(p))) for p in again] == [n + len(inside) for n in count]


@pytest.mark.parametrize("budget", [0.75, 0.5, 0.25])
def test_a_budget_is_kept(budget: float) -> None:
    step = llama_step((1, 1, 1))
    (program,) = step.changed(Recompute(budget=budget))
    before, after = (sum(_SavedValues(p, Recompute(budget=0.5)).kept.values()) for p in (step.programs[0], program))
    assert after <= budget * before


class Noisy(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def noisy_step() -> Step:
    def model() -> nn.Module:
        m = Noisy()
        for p in m.parameters():
            p.data = p.data.clone()
        return m

    return recorded(model, (torch.randn(4, 8),), 1, "SGD")


def test_random_numbers_are_not_drawn_twice() -> None:
    step = noisy_step()
    (program,) = step.changed(Recompute(BLOCKS))
    assert [n.op for n in program.nodes if is_random_operator(n.op)] == [
        n.op for n in step.programs[0].nodes if is_random_operator(n.op)
    ]
    torch.manual_seed(3)
    first = step.run()
    torch.manual_seed(3)
    second = step.run([program])
    assert all(torch.equal(a, b) for a, b in zip(first[0][1], second[0][1], strict=True))
    gelu = {k: n for k, n in count_ops(program.nodes).items() if "gelu." in k}
    assert gelu == {"aten.gelu.default": 2}  # the last one's result has no other reader


@pytest.mark.parametrize("how", [{}, {"budget": 2.0}, {"budget": 0.5, "communication": True}])
def test_a_policy_without_content_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(RewriteError):
        Recompute(**how)


def test_an_unknown_layer_changes_nothing() -> None:
    step = llama_step((1, 1, 1))
    assert Recompute(("layers.*",)).run(step.programs[0]) is step.programs[0]


def test_the_pass_is_found_by_name() -> None:
    assert mw.Strategy(passes=(Recompute(BLOCKS),)).passes[0].name == "recompute"
