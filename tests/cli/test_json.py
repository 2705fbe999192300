"""`--json`: one object on one line of standard output and nothing else; no output for a mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks.cli import PLAN, TYPED, Line, fault_of, make_files
from meshwright.cli import main
from meshwright.cli.console.parser import PARSERS

MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), [torch.ones(4, 8)]
"""
TRAIN = "train --steps 1 --hidden 32 --layers 2 --batch 4 --seq 16 --mesh dp=2"
GOOD_COMMANDS = (
    TRAIN,
    f"{TRAIN} --save {{f}}/run",
    "schedule 1F1B", "schedule list",
    PLAN, "predict {f}/config.json {f}/plan.toml --cluster 2xH100",
    "explain {f}/config.json {f}/plan.toml --cluster 2xH100 --alone",
    "checkpoint inspect {f}/run", "checkpoint verify {f}/run", "checkpoint diff {f}/run {f}/run",
    "checkpoint convert {f}/run {f}/new --to dcp",
    "parallelize {f}/model.py:build --ranks 2",
    "quantize {f}/model.py:build --dry-run", "quantize {f}/model.py:build --out {f}/quantized_model",
    "profile --dry-run",
    "doctor --no-check",
    "conformance --device cpu --level 0 --only float32",
)  # fmt: skip
"""The order matters: the second command writes the checkpoint."""
WITH_JSON = [name for name, parser in PARSERS.items() if "--json" in parser().options]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("json")
    make_files(found)
    (found / "model.py").write_text(MODEL)
    return found


def refused(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


@pytest.mark.parametrize("text", GOOD_COMMANDS)
def test_the_output_is_one_object(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*text.format(f=folder).split(), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert isinstance(json.loads(line, parse_constant=refused), dict)


@pytest.mark.parametrize(
    "line", [line for line in TYPED if line.text.split()[0] in WITH_JSON], ids=lambda line: line.text
)
def test_a_mistake_gives_the_same_message_as_without_json(line: Line, folder: Path) -> None:
    command, *words = line.text.split()
    assert fault_of(replace(line, text=" ".join([command, "--json", *words])), folder) == ""


def test_every_command_with_a_result_has_the_option() -> None:
    assert {text.split()[0] for text in GOOD_COMMANDS} == set(WITH_JSON) == set(PARSERS) - {"run"}
