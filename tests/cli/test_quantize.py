"""`meshwright quantize`: the same files on any number of ranks, and a report of sizes, errors and perplexity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.cli import main
from meshwright.cli.console.quantize_page import picture

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lm_head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def build():
    return Net()


def fails():
    net = Net()
    net.forward = lambda x: net.words(x, 5)
    return net
"""
GPTQ = ["--scheme", "w4a16-gptq", "--group-size", "16", "--sequence", "16", "--samples", "8"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("The work is shared by all ranks. " * 12)
    return tmp_path


def told(files: Path, *words: str, model: str = "net.py:build") -> list[str]:
    return ["quantize", f"{files}/{model}", *GPTQ, "--data", f"{files}/text.txt", *words]


def test_files_and_report_do_not_depend_on_the_ranks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[dict[str, Any]] = []
    for ranks in ("1", "4"):
        out = ["--ranks", ranks, "--out", f"{files}/on{ranks}", "--html", f"{files}/report.html", "--json"]
        assert main(told(files, *out)) == 0
        printed = capsys.readouterr()
        reports.append(json.loads(printed.out))
        assert [line.partition(":")[0] for line in printed.err.splitlines()] == ["layers.0", "layers.1"]
    one, four = reports
    for name in ("model.safetensors", "config.json"):
        assert (files / "on1" / name).read_bytes() == (files / "on4" / name).read_bytes()
    assert one["errors"] == four["errors"]
    assert one["bytes"]["after"] < one["bytes"]["before"]
    assert set(one["left_out"]) == {"lm_head"}
    assert 0 < abs(one["perplexity"]["after"] / one["perplexity"]["before"] - 1) < 0.05
    assert one["perplexity"]["after"] == pytest.approx(four["perplexity"]["after"])
    assert (files / "report.html").read_text().count("<rect") == len(one["errors"]) == 4


def test_calibrated_blocks_are_read_on_other_ranks(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["--resume", f"{files}/blocks"]
    (files / "a").mkdir()
    monkeypatch.chdir(files)  # a folder beside the model has no influence, whatever its name
    assert main(told(files, *resume, "--dry-run")) == 0
    assert not (files / "blocks").exists()
    assert main(told(files, *resume, "--out", f"{files}/one")) == 0
    shutil.rmtree(files / "blocks" / "stage_00002")
    capsys.readouterr()
    assert main(told(files, *resume, "--out", f"{files}/two", "--ranks", "2")) == 0
    assert ["read, not calibrated" in line for line in capsys.readouterr().err.splitlines()] == [True, False]
    assert (files / "one/model.safetensors").read_bytes() == (files / "two/model.safetensors").read_bytes()
    assert main(told(files, *resume, "--group-size", "32", "--out", f"{files}/three")) == 1
    assert "the results of another scheme" in capsys.readouterr().err


def test_a_failure_leaves_no_folder(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(files.iterdir())
    assert main(told(files, "--out", f"{files}/new", model="net.py:fails")) == 1
    assert "raised TypeError" in capsys.readouterr().err
    assert {path for path in files.iterdir() if path.name != "__pycache__"} == before


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (["--ignore", "re:*.up"], r"write ignore=(re:.*\\.up,)"),
        (["--html", "page.html"], "leave out --html, or --dry-run"),
    ],
)
def test_a_wrong_option_is_an_error_of_usage(
    options: list[str], fix: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", f"{files / 'net.py'}:build", "--dry-run", *options]) == 2
    assert fix in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (["--resume", "new/blocks"], "pass --resume with a folder beside --out"),
        (["--resume", "new"], "pass --resume with a folder beside --out"),
        (["--resume", __file__], "is no folder"),
        (["--resume", "blocks", "--scheme", "w4a16"], "leave out --resume"),
    ],
)
def test_a_folder_that_cannot_be_used_is_an_error_of_usage(
    options: list[str], fix: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(told(files, "--out", "new", *options)) == 2
    assert fix in capsys.readouterr().err


def test_a_full_disk_is_found_before_the_work(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert main(told(files, "--out", f"{files}/new")) == 2
    assert "1 kB free" in capsys.readouterr().err


def test_a_bar_is_as_high_as_its_error() -> None:
    drawn = picture({"a": 0.1, "b": 0.2})
    assert 'height="76.0"' in drawn
    assert 'height="152.0"' in drawn


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers_is_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("ab" * 40)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert main(told(tmp_path, "--ranks", "2", "--out", f"{tmp_path}/new", model="model")) == 0
    assert "14 layers" in capsys.readouterr().out
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == "{{ messages }}"
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(tmp_path / "new", dtype=torch.float32)
    assert torch.isfinite(model(torch.arange(8).view(1, 8)).logits).all()
