"""`meshwright explain`: an account in a terminal, as data, and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

LLAMA = {
    "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 4096, "vocab_size": 32000, "hidden_act": "silu",
}  # fmt: skip
ON = ["--cluster", "8xA100, 4 per node, 100G"]


@pytest.fixture
def explain_arguments(tmp_path: Path) -> list[str]:
    config, plan = tmp_path / "config.json", tmp_path / "plan.toml"
    config.write_text(json.dumps(LLAMA))
    plan.write_text("dp = 2\ntp = 2\npp = 2\nsequence_parallel = true\nbatch = 32\nsequence = 2048\n")
    return ["explain", str(config), str(plan), *ON]


def test_an_account_is_printed(explain_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(explain_arguments) == 0
    said = capsys.readouterr().out
    for part in (
        "layouts of tensors",
        "bf16[32000@tp, 1024]",
        "communications of a step",
        "over tp",
        "100G, between nodes",
        "NVLink3, inside a node",
        "seconds of a step by part",
        "bubble",
        "pipeline rank 1",
        "why",
        "what this assumes",
        "what would change it",
        "other plans",
        " x ",
    ):
        assert part in said


def test_data_and_page_have_the_same_content(
    explain_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, measured = tmp_path / "report.html", tmp_path / "measured.json"
    measured.write_text('{"seconds": 2, "bytes": 1e10}')
    assert main([*explain_arguments, "--json", "--html", str(out), "--measured", str(measured)]) == 0
    streams = capsys.readouterr()
    told: dict[str, Any] = json.loads(streams.out)
    assert streams.err == ""
    assert told["seconds"] == pytest.approx(sum(told["spent"].values()))
    assert told["plan"]["pp"] == 2
    assert told["instead"]
    assert told["measured"]["seconds"] == 2
    made = out.read_text()
    assert made.startswith("<!DOCTYPE html>")
    assert "Predicted and measured" in made
    assert all(row["how"] in made for row in told["instead"])


def test_batch_and_sequence_can_be_given(explain_arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*explain_arguments, "--batch", "64", "--sequence", "1024", "--alone", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["plan"]["batch"], told["plan"]["sequence"]) == (64, 1024)
    assert told["instead"] == []


def test_a_plan_found_by_search_is_explained_by_its_bottleneck(
    explain_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config, _, *on = explain_arguments
    out = str(tmp_path / "best.toml")
    assert main(["plan", config, *on, "--batch", "32", "--sequence", "2048", "--out", out]) == 0
    assert capsys.readouterr().err == ""
    assert main(["explain", config, out, *on, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not told["why"][0].startswith("another plan")
    assert min(row["seconds"] for row in told["instead"]) >= told["seconds"]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--html", "/nowhere/report.html"], 2, "a folder that exists"),
        (["--measured", "/nowhere.json"], 2, "can be read"),
        (["--cluster", "many"], 1, "neither a number of devices"),
        (["--sequence", "0"], 2, "positive"),
        (["--htlm", "x"], 2, "--html"),
    ],
)
def test_impossible_requests_give_a_message(
    more: list[str], code: int, said: str, explain_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*explain_arguments, "--alone", *more]) == code
    assert said in capsys.readouterr().err


def test_measurements_are_read_from_the_log_of_a_run(
    explain_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    steps = [{"event": "step", "step": n, "seconds": s, "peak_memory": 5e9} for n, s in enumerate((9.0, 2.0, 4.0, 3.0))]
    log.write_text("\n".join(json.dumps(line) for line in [{"event": "start", "step": 0}, *steps]))
    assert main([*explain_arguments, "--alone", "--json", "--measured", str(log)]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == {"seconds": 3.0, "bytes": 5e9}
    log.write_text('{"event": "start", "step": 0}')
    assert main([*explain_arguments, "--alone", "--measured", str(log)]) == 2
    assert "the log has no step" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", '{"seconds": "soon"}', '{"seconds": null}'])
def test_measurements_that_are_not_numbers_are_refused(
    text: str, explain_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    assert main([*explain_arguments, "--alone", "--measured", str(path)]) == 2
    assert "fix:" in capsys.readouterr().err
