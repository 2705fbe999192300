"""`meshwright parallelize`: the printed lines run, and give the numbers of one device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from benchmarks._static_models import SUBJECTS
from meshwright.cli import main
from meshwright.cost import cluster_of
from meshwright.engine import Suggestion, suggest

MINE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 512), nn.Linear(512, 50)
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(out, labels):
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def build():
    return Net(), (torch.randint(0, 50, (2, 16)), torch.randint(0, 50, (2, 16))), loss


def fails():
    raise KeyError("lost")


def number():
    return 5
"""

HEAD = "self.head = nn.Linear(512, 50)"
"""The module that must be registered after the layers, so that stages have the right order."""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_the_printed_code_runs_and_is_right(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = mine.parent / "lines.py"
    assert main(["parallelize", f"{mine}:build", "--mesh", "dp=2,tp=2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert '"layers.*.up": mw.ColwiseParallel(),' in printed
    assert '"layers.*.down": mw.RowwiseParallel(),' in printed
    assert "left out" not in printed
    names: dict[str, Any] = {}
    exec(MINE, names)
    torch.manual_seed(0)
    model, batch, loss = names["build"]()
    lines = out.read_text().replace("model, optimizer = ", "pass # ")
    exec(lines, names)
    found = mw.verify(model, batch, loss, mesh=names["mesh"], marks=names["config"])
    assert found.equal, str(found)


def test_stages_are_written_by_names(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "self.words, self.head = nn.Embedding(50, 512), nn.Linear(512, 50)"
    layers = "self.layers = nn.ModuleList([Block() for _ in range(2)])"
    mine.write_text(
        MINE.replace(words, "self.words = nn.Embedding(50, 512)").replace(layers, f"{layers}\n        {HEAD}")
    )
    assert main(["parallelize", f"{mine}:build", "--mesh", "pp=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["mesh"], told["pipeline"]["split"]) == ({"pp": 2, "dp": 1, "tp": 1}, ["layers.1"])
    out = mine.parent / "lines.py"
    assert main(["parallelize", f"{mine}:build", "--mesh", "pp=2", "--out", str(out)]) == 0
    assert "split=('layers.1',)" in out.read_text()
    assert "Strategy.of(pipeline={'enable': True" in out.read_text()
    names: dict[str, Any] = {}
    exec(mine.read_text(), names)
    torch.manual_seed(0)
    model, (x, y), loss = names["build"]()
    wanted = loss(model(x), y).item()

    def on_rank() -> float:
        found: dict[str, Any] = {"model": names["Net"](), "optimizer": None}
        found["model"].load_state_dict(model.state_dict())
        exec(out.read_text(), found)
        return loss(found["model"](x), y).item()

    assert mw.simulate(on_rank, 2)[0] == pytest.approx(wanted, rel=1e-5)


def test_it_prints_json(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallelize", f"{mine}:build", "--ranks", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mesh"]["dp"] * told["mesh"]["tp"] == 2
    assert told["seconds"] > 0


def test_names_of_a_config_are_those_of_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 1024,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 4096,
                "vocab_size": 1000,
            }
        )
    )
    asked = ["--mesh", "tp=2", "--batch", "1", "--cluster", "8xA100"]
    assert main(["parallelize", str(config), *asked]) == 0
    assert '"model.layers.*.self_attn.q_proj": mw.ColwiseParallel(),' in capsys.readouterr().out


def test_layouts_without_a_style_are_left_out() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(1024, 4096))
            self.back = nn.Linear(4096, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.back(torch.relu(x @ self.matrix)).sum()

    found = suggest(Own(), [torch.randn(2, 1024)], mesh={"tp": 2})
    assert any(line.startswith("matrix: the plan has the layout f32[1024, 4096@tp]") for line in found.left_out)
    assert "# left out: matrix" in found.text()


@pytest.mark.parametrize(
    ("line", "code", "answer"),
    [
        ("{mine}:build", 2, "--mesh dp=2,tp=4"),
        ("{mine}:built --ranks 2", 2, "mine.py:build"),
        ("{mine}:number --ranks 2", 2, "returns a int"),
        ("{mine}:fails --ranks 2", 1, "mine.py:37"),
        ("{mine}:build --mesh ep=2", 1, "layers (pp), batches (dp)"),
        ("{mine}:build --mesh pp=2", 1, "registered in another order"),
        ("{mine}:build --mesh dp=4", 1, "another mesh"),
        ("nowhere.py:build --ranks 2", 2, "there is no such file"),
        ("nowhere.json --ranks 2", 2, "No such file"),
    ],
)
def test_bad_lines_give_a_message(
    line: str, code: int, answer: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parallelize", *line.format(mine=mine).split()]) == code
    error = capsys.readouterr().err
    assert answer in error
    assert "Traceback" not in error


def test_memory_saving_options_are_written_or_reported() -> None:
    """ZeRO is a level of the configuration; recomputed layers and pieces of a batch belong to the step."""
    subject = SUBJECTS["llama"]
    model, (x, y) = subject.make().eval(), subject.batch(0)
    usual = cluster_of("cpu core")

    def found(memory: float) -> Suggestion:
        cores = replace(usual, device=replace(usual.device, memory=memory))
        return suggest(model, [x, y], mesh={"dp": 2, "tp": 2}, cluster=cores)

    assert (found(250e3).config.zero, found(250e3).left_out) == (3, ())
    assert "zero=3" in found(250e3).text()
    (told,) = found(205e3).left_out
    assert "recompute={'enable': True, 'layers': ['blocks.*']}" in told
    assert "zero" not in found(4e9).text()
