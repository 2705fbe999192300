"""A pipeline that loads its programs makes the same steps as the one that saved them, and records nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm import launch
from meshwright.engine import DistModel, StaticError
from meshwright.graph import ProgramFileError
from tests.pipeline.oracle import Chain, batch, laid, loss_of

pytestmark = pytest.mark.usefixtures("forked_processes")

ROWS, STEPS = 4, 3
RECOMPUTED = """\
1F1B with R: 2 microbatches
way: 0 1
0: F0.0 F1.0 R0.0 B0.0 W0.0 BW1.0
1: F0.1 R0.1 BW0.1 F1.1 R1.1 B1.1 W1.1
"""


def made(
    mode: str,
    way: tuple[int, ...] = (0, 1),
    microbatches: int = 2,
    tied: bool = True,
    buffers: bool = True,
    ranks_per_stage: int = 1,
    **strategy: Any,
) -> DistModel:
    torch.manual_seed(1)
    model = laid(Chain(len(way), tied, buffers), way, ranks_per_stage)
    options = {"enable": True, "schedule_mode": mode, "accumulate_steps": microbatches}
    return mw.to_static(
        model, None, loss, torch.optim.AdamW(model.parameters(), 0.01), mw.Strategy.of(pipeline=options, **strategy)
    )


def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss_of(out, labels)


def steps(model: DistModel) -> list[Any]:
    """Return losses of whole batches and of separate microbatches, and parameters, buffers and states afterwards."""
    found: list[Any] = [model(*batch(n, ROWS * 2)) for n in range(STEPS)]
    count = model.strategy.pipeline.accumulate_steps
    found.append(model.accumulate([batch(n, 2 + n % 2, 3 + n % 2) for n in range(count)]))
    return [
        *found,
        *(mw.unshard_dtensor(x.detach()) for x in model.state_dict().values() if isinstance(x, torch.Tensor)),
    ]


CASES: dict[str, Callable[[], DistModel]] = {
    "1F1B, tied weights": lambda: made("1F1B"),
    "chosen, stages of two ranks": lambda: made("auto", ranks_per_stage=2),
    "ZB-V": lambda: made("ZB-V", (0, 1, 1, 0), 4),
    "interleaved": lambda: made("Interleaved 1F1B", (0, 1, 0, 1), 4, tied=False),
    "two copies": lambda: made("DualPipe", (0, 1), 4, buffers=False),
    "recomputed": lambda: made(RECOMPUTED, recompute={"enable": True, "layers": ["blocks.*"]}),
    "sharded states": lambda: made("ZB-H1", ranks_per_stage=2, sharding={"enable": True, "stage": 2, "least": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_loaded_programs_equal_saved_ones(case: str, tmp_path: Path) -> None:
    def first() -> list[Any]:
        model = CASES[case]()
        found = steps(model)
        model.save(tmp_path)
        return [str(model.pipeline), model.recordings, *found]

    def again() -> list[Any]:
        model = CASES[case]().load(tmp_path)
        found = steps(model)
        model.save(tmp_path / "again")
        return [str(model.pipeline), model.recordings, *found]

    ranks = 4 if "two ranks" in case or "sharded" in case else 2
    for saved, loaded in zip(mw.simulate(first, ranks), mw.simulate(again, ranks), strict=True):
        assert (saved[0], saved[1], loaded[1]) == (loaded[0], 2, 0)
        assert len(saved) == len(loaded) > 10
        assert all(torch.equal(a, b) for a, b in zip(saved[2:], loaded[2:], strict=True))
    counts = [len(list(place.glob("*.safetensors"))) for place in (tmp_path, tmp_path / "again")]
    assert counts == [4, 4]  # two programs for each of two stages: of whole batches and of microbatches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pipeline")

    def save() -> None:
        model = made("1F1B")
        model(*batch(0, ROWS))
        model.save(place)

    mw.simulate(save, 2)
    return place


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: made("GPipe"), "strategy was .*1F1B.*, and is .*GPipe"),
        (lambda: made("1F1B", microbatches=4), "strategy was .*, and is .*accumulate_steps=4"),
        (lambda: made("1F1B", tied=False), "exit.weight was missing, and is"),
    ],
)
def test_another_pipeline_is_refused(folder: Path, model: Callable[[], DistModel], told: str) -> None:
    with pytest.raises(StaticError, match=told):
        mw.simulate(lambda: model().load(folder), 2)


def no_such_part(table: Any) -> None:
    table["copies"][0]["parts"][0][0] = "X"


def fewer_nodes(table: Any) -> None:
    table["copies"][0]["crossings"][0][0] = 0


def no_table(table: Any) -> None:
    table["schedule"] = "1F1B"


def stuck(table: Any) -> None:
    table["schedule"] = table["schedule"].replace("F0.0 F1.0", "F0.0 F0.0")


def no_value(table: Any) -> None:
    table["feeds"][0][0][0] = "nothing"


@pytest.mark.parametrize("damage", [no_such_part, fewer_nodes, no_table, stuck, no_value])
def test_an_invalid_table_is_refused(folder: Path, tmp_path: Path, damage: Callable[[Any], None]) -> None:
    """Also if its checksum is right."""
    place = Path(copytree(folder, tmp_path / "damaged"))
    for path in place.glob("programs-*.json"):
        index = json.loads(json.loads(path.read_text())["index"])
        damage(index["programs"][0]["pipeline"])
        text = json.dumps(index)
        path.write_text(json.dumps({"sha256": sha256(text.encode()).hexdigest(), "index": text}))
    with pytest.raises(ProgramFileError):
        mw.simulate(lambda: made("1F1B").load(place), 2)


def test_on_processes(tmp_path: Path) -> None:
    assert launch([str(Path(__file__).with_name("_pipeline_program.py")), str(tmp_path)], 2, timeout=120) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["save"]["losses"] == found["load"]["losses"]
        assert (found["save"]["recordings"], found["load"]["recordings"]) == (1, 0)
