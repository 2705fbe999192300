"""Programs loaded from one folder compared with programs that each rank records alone: how many differ.

    python -m benchmarks one_program            twelve models, sixteen settings, and a model of 70 billion parameters
    python -m benchmarks one_program --quick    three models, and a smaller one at the end

For each model and setting each rank records its training step alone, and all of them save into one folder. Then each
rank loads from that folder. The loaded program is compared with the recorded one: operators, shapes, layouts, inputs
and constants. At the end the step of a Llama of 70 billion parameters is recorded for three numbers of ranks, on the
meta device. The size of the folder must not grow with the ranks.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from benchmarks._matrix_models import MODELS, Subject
from benchmarks._matrix_settings import STATIC, Setting, mark
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.graph import canonical_text
from meshwright.models import Llama, LlamaConfig
from meshwright.models import mark as mark_llama
from meshwright.models._llama import rope_table

SUBJECTS = (
    "GPT-2", "Llama", "Gemma-2", "BERT", "T5", "ViT", "ConvNeXt", "ResNet", "CLIP", "Whisper", "Mixtral", "DeepSeek-V3",
)  # fmt: skip
QUICK = ("GPT-2", "ViT", "Mixtral")


def _zero(stage: int, ranks: int) -> Setting:
    options = {"sharding": {"enable": True, "stage": stage, "least": 16}}
    return Setting({"dp": ranks}, rows=("dp",), zero=stage, options=options)


EVEN = {
    "dp": Setting({"dp": 2}, rows=("dp",)),
    "tp": Setting({"tp": 2}, weights=("tp",)),
    "dp×tp": Setting({"dp": 2, "tp": 2}, rows=("dp",), weights=("tp",)),
    "ZeRO-1": _zero(1, 2),
    "ZeRO-3": _zero(3, 8),
    "cp": Setting({"dp": 2, "cp": 2}, rows=("dp",), positions=("cp",)),
    "ep": Setting({"dp": 2, "ep": 2}, rows=("dp", "ep"), experts=("ep",)),
    "pp": Setting({"dp": 2, "pp": 2}, rows=("dp",), stages="pp"),
}
UNEVEN = {
    "dp, uneven": Setting({"dp": 3}, rows=("dp",)),
    "tp, uneven": Setting({"tp": 3}, weights=("tp",)),
    "dp×tp, uneven": Setting({"dp": 3, "tp": 2}, rows=("dp",), weights=("tp",)),
    "ZeRO-1, uneven": _zero(1, 5),
    "ZeRO-3, uneven": _zero(3, 3),
    "cp, uneven": Setting({"dp": 1, "cp": 3}, rows=("dp",), positions=("cp",)),
    "ep, uneven": Setting({"dp": 1, "ep": 3}, rows=("dp", "ep"), experts=("ep",)),
    "pp, uneven": Setting({"dp": 3, "pp": 2}, rows=("dp",), stages="pp"),
}
SETTINGS = EVEN | UNEVEN
WORLDS = (512, 2048, 8192)
GROWTH = 0.01
"""Largest relative growth of the folder from the fewest ranks to the most: numbers have more digits."""


@dataclass(frozen=True)
class Case:
    """A model in a setting."""

    subject: Subject
    setting: Setting

    @property
    def unfit(self) -> str:
        return self.setting.unfit(self.subject.make(), self.subject.draw(0))

    def model(self) -> mw.DistModel:
        torch.manual_seed(0)
        model = mark(self.subject.make(), self.setting, STATIC)
        options = {"pipeline": {"enable": True}} if self.setting.stages else dict(self.setting.options)
        return mw.to_static(model, None, None, torch.optim.AdamW(model.parameters()), mw.Strategy.of(**options))

    def batch(self) -> tuple[Tensor, ...]:
        return self.setting.enter(self.subject.draw(0))


def differences(case: Case, folder: Path) -> dict[str, int]:
    """Return how many ranks load another program than they record, the number of ranks, and the folder's files."""
    ranks = case.setting.ranks
    alone: list[str] = []
    for rank in range(ranks):
        with using_communicator(PeerlessCommunicator(rank, ranks)):
            model = case.model()
            alone.append(canonical_text(model.compile(*case.batch())))
            model.save(folder)
    differ = sum(_differs(case, rank, folder, alone[rank]) for rank in range(ranks))
    return {"differ": differ, "ranks": ranks, "files": len(list(folder.glob("*.safetensors")))}


def _differs(case: Case, rank: int, folder: Path, alone: str) -> bool:
    with using_communicator(PeerlessCommunicator(rank, case.setting.ranks)):
        model = case.model().load(folder)
        found = canonical_text(model.compile(*case.batch()))
        return model.recordings != 0 or found != alone


def large_bytes(ranks: int, layers: int, folder: Path) -> int:
    """Return the size of the folder for a Llama whose layers are sharded over 8 ranks, with ZeRO-1 over the others."""
    rope_table.cache_clear()  # the table of an earlier recording would be a constant of this one
    sizes = {"vocab": 32000, "hidden": 8192, "heads": 64, "kv_heads": 8, "feed_forward": 28672}
    with using_communicator(PeerlessCommunicator(0, ranks)):
        mesh = mw.ProcessMesh(torch.arange(ranks).reshape(1, -1, 8).tolist(), ["pp", "dp", "tp"])
        with torch.device("meta"):
            model = Llama(LlamaConfig(layers=layers, **sizes))
            tokens = torch.empty(ranks // 8, 4096, dtype=torch.long)
        mark_llama(model, mesh)
        strategy = mw.Strategy.of(sharding={"enable": True, "stage": 1})
        step = mw.to_static(model, None, None, torch.optim.AdamW(model.parameters()), strategy)
        step.compile(tokens, tokens)
        step.save(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def _cases(quick: bool) -> Iterator[tuple[str, Case]]:
    for name in QUICK if quick else SUBJECTS:
        for how, setting in SETTINGS.items():
            case = Case(MODELS[name], setting)
            if not case.unfit:
                yield f"{name}, {how}", case


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of ranks whose program from the folder differs or is missing."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, int]] = {}
    raised: dict[str, str] = {}
    for name, case in _cases(quick):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = differences(case, Path(folder))
            except mw.MeshwrightError as error:
                raised[name] = str(error)
        print(f"# {name}: {found.get(name) or raised[name]}", file=sys.stderr, flush=True)
    sizes = dict(_large(layers=2 if quick else 80))
    differ = sum(case["differ"] for case in found.values())
    grown = max(sizes.values()) / sizes[min(WORLDS)] - 1
    return {
        "value": differ,
        "goal": 0,
        "ok": differ == 0 and not raised and grown <= GROWTH,
        "details": {
            "programs": sum(case["ranks"] for case in found.values()),
            "files": sum(case["files"] for case in found.values()),
            "cases": len(found),
            "raised": raised,
            "large_bytes": {str(ranks): size for ranks, size in sizes.items()},
            "growth": round(grown, 4),
            "growth_goal": GROWTH,
        },
    }


def _large(layers: int) -> Iterator[tuple[int, int]]:
    for ranks in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            size = large_bytes(ranks, layers, Path(folder))
        print(f"# {layers} layers on {ranks} ranks: {size} bytes", file=sys.stderr, flush=True)
        yield ranks, size
