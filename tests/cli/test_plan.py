"""`meshwright plan` and `meshwright predict`: from a configuration and a cluster to a plan, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.console.parser import PRECISIONS
from meshwright.search.transformer_plans.layer_time import PRECISIONS as KNOWN_PRECISIONS

LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
}  # fmt: skip
OPTIONS = ["--cluster", "64xH100, 8 per node, 400G", "--batch", "256", "--sequence", "8192"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def test_a_plan_is_found_and_printed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, *OPTIONS, "--given", "tp=4"]) == 0
    said = capsys.readouterr().out
    assert "tp                   4" in said
    assert "tokens/s" in said.splitlines()[0]
    assert "s per step" in said.splitlines()[1]
    titles = "the next best:", "what would help most:", "known recipes", "what would change it", "what this assumes"
    assert all(title in said for title in titles)


def test_a_simpler_plan_is_printed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", config, "--cluster", "8xH100", "--batch", "128", "--sequence", "8192", "--given", "recompute=none"]
    assert main(asked) == 0
    assert "a simpler plan, nearly as fast:" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["plan"]["pp"] > told["simpler"]["plan"]["pp"] == 1
    assert told["seconds"] < told["simpler"]["seconds"] <= 1.03 * told["seconds"]


def test_a_written_plan_has_the_same_prediction(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.toml")
    assert main(["plan", config, *OPTIONS, "--json", "--out", out]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["predict", config, out, "--cluster", "64xH100, 8 per node, 400G", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told.pop("changes")  # a search also knows plans that need more memory
    assert {name: told[name] for name in told} == {name: found[name] for name in told}
    assert len(found["recipes"]) == 2
    assert found["fits"]
    assert found["ranks"] == 64
    assert main(["predict", config, out, "--cluster", "64xH100, 8 per node, 400G"]) == 0
    assert "% of the peak" in capsys.readouterr().out


def test_uneven_experts_take_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = tmp_path / "experts.json", tmp_path / "plan.toml"
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    path.write_text(json.dumps({**LLAMA, **experts}))
    plan.write_text("dp = 64\nep = 8\nbatch = 64\nzero = 1\nsequence = 4096\n")
    took: list[float] = []
    for more in ([], ["--imbalance", "1.5"]):
        asked = ["predict", str(path), str(plan), "--cluster", "64xH100, 8 per node, 400G", "--json"]
        assert main([*asked, *more]) == 0
        took.append(json.loads(capsys.readouterr().out)["seconds"])
    assert took[1] > 1.05 * took[0]


def test_a_file_says_how_many_tokens_are_predicted_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = tmp_path / "ahead.json", tmp_path / "plan.toml"
    path.write_text(json.dumps({**LLAMA, "num_nextn_predict_layers": 1}))
    plan.write_text("dp = 64\nbatch = 64\nzero = 1\nsequence = 4096\n")
    took: list[float] = []
    for more in ([], ["--ahead", "1"], ["--ahead", "0"]):
        asked = ["predict", str(path), str(plan), "--cluster", "64xH100, 8 per node, 400G", "--json"]
        assert main([*asked, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert ("further tokens" in " ".join(told["assumed"])) == (more != ["--ahead", "0"])
        took.append(told["seconds"])
    assert took[0] == took[1] > took[2]


def test_the_command_line_knows_all_precisions() -> None:
    assert PRECISIONS == KNOWN_PRECISIONS


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--cluster", "2xV100"], 1, "GB are missing"),
        (["--imbalance", "1.2"], 2, "has no experts"),
        (["--cluster", "many"], 1, "neither a number of devices"),
        (["--given", "tp"], 2, "NAME=VALUE"),
        (["--given", "tensor=2"], 1, "tensor"),
        (["--given", "keep=2"], 1, "keep"),
        (["--given", "batch=2"], 2, "--batch"),
        (["--given", "microbatch=0"], 1, "microbatch = 0"),
        (["--given", "zero=some"], 1, "zero = 'some'"),
    ],
)
def test_impossible_requests_give_a_message(
    more: list[str], code: int, said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *OPTIONS, *more]) == code
    assert said in capsys.readouterr().err


def test_unreadable_files_give_a_message(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none.json"), *OPTIONS]) == 2
    assert "none.json" in capsys.readouterr().err
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert main(["plan", str(bad), *OPTIONS]) == 2
    bad.write_text('{"hidden_size": 64}')
    assert main(["plan", str(bad), *OPTIONS]) == 1
    assert "num_hidden_layers" in capsys.readouterr().err
    plan = tmp_path / "plan.toml"
    plan.write_text("dp = 0\n")
    assert main(["predict", config, str(plan), "--cluster", "8xH100"]) == 1
    assert "dp = 0" in capsys.readouterr().err


PHASES = ["--cluster", "8xH100", "--phases", "train,generate", "--prompts", "16", "--prompt-tokens", "256"]


def test_two_phases_are_planned_together(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", config, *PHASES, "--new-tokens", "256", "--samples", "4", "--given", "pp=1"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in ("generation:", "decode", "assumed:", "the runner-up takes"))
    out = tmp_path / "plan.toml"
    assert main([*asked, "--json", "--out", str(out)]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["generate"]["replicas"] * told["generate"]["tp"] == 8
    assert told["seconds"] <= told["next"][0]["seconds"]
    assert main(["predict", config, str(out), "--cluster", "8xH100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(told["train"]["seconds"])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (PHASES, 2, "without --new-tokens"),
        ([*PHASES, "--new-tokens", "9", "--batch", "8"], 2, "with --batch"),
        (["--cluster", "8xH100", "--batch", "8"], 2, "without --sequence"),
        ([*PHASES, "--new-tokens", "9", "--given", "tp=2,batch=8"], 2, "leave out --given batch: all"),
        ([*OPTIONS, "--samples", "8"], 2, "pass --phases train,generate, or leave out --samples"),
        (["--cluster", "8xH100", "--prompts", "8"], 2, "pass --phases train,generate, or leave out --prompts"),
        ([*OPTIONS, "--phases", "generate"], 2, "train,generate"),
        ([*PHASES, "--new-tokens", "256", "--ranks", "1"], 1, "are missing on each rank"),
    ],
)
def test_sizes_of_other_phases_give_a_message(
    options: list[str], code: int, said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *options]) == code
    assert said in capsys.readouterr().err
