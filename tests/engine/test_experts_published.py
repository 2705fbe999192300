"""Models with experts from a library, by each of their implementations and by ours, compared with one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw
from benchmarks._matrix_models import MODELS, Subject
from benchmarks._matrix_settings import SETTINGS, Setting
from benchmarks.matrix import GOAL, difference, train

SETTING = {
    "ep": SETTINGS["ep"],
    "ep × tp": Setting({"ep": 2, "tp": 2}, rows=("ep",), weights=("tp",), experts=("ep",)),
}


def dispatched(module: Any, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the output by the function that docs/how-to/experts.md registers."""
    up = module.gate_up_proj if module.has_gate else module.up_proj

    def experts(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
        if not module.is_transposed:
            up, down = up.mT, down.mT
        made = F.grouped_mm(rows, up, offs=ends)
        made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
        return F.grouped_mm(made, down, offs=ends)

    return mw.dispatch_experts(tokens, indices, weights, experts, [up, module.down_proj])


@dataclass(frozen=True)
class By(Subject):
    """A model whose experts use the named implementation, with the loss of its router if it has one."""

    way: str = "grouped_mm"

    def make(self) -> Any:
        task = super().make()
        task.model.set_experts_implementation(self.way)
        return task


def subject(name: str, way: str) -> By:
    found = MODELS[name]
    told = {} if name == "DeepSeek-V3" else {"output_router_logits": True}
    return By(**{**vars(replace(found)), "constants": {**found.constants, **told}}, way=way)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    moe = pytest.importorskip("transformers.integrations.moe")
    moe.ALL_EXPERTS_FUNCTIONS["dispatched"] = dispatched
    yield
    del moe.ALL_EXPERTS_FUNCTIONS["dispatched"]


CELLS = [
    *[("Mixtral", way, "ep", "eager") for way in ("grouped_mm", "batched_mm", "eager", "dispatched")],
    *[(name, "dispatched", "ep", "eager") for name in ("Qwen3-MoE", "DeepSeek-V3")],
    *[("Mixtral", way, "ep × tp", "eager") for way in ("grouped_mm", "dispatched")],
    ("Mixtral", "dispatched", "ep", "static"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way", "setting", "mode"), CELLS, ids=[" ".join(c) for c in CELLS])
def test_a_library_model_has_the_numbers_of_one_device(name: str, way: str, setting: str, mode: str) -> None:
    wanted, given = train(subject(name, "grouped_mm"), None), SETTING[setting]
    for worst, where in mw.simulate(lambda: difference(train(subject(name, way), given, mode), wanted), given.ranks):
        assert worst < GOAL, where
