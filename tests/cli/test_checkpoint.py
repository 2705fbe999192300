"""`meshwright checkpoint`: inspect, verify, diff and convert, and their messages about faults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import meshwright as mw
from meshwright.cli import main

PAIR = mw.ProcessMesh([0, 1], ["tp"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with two steps, saved by two ranks."""

    def save() -> None:
        for step in (1, 2):
            w = mw.shard_tensor(torch.arange(12.0).reshape(4, 3) * step, PAIR, [mw.Shard(0)])
            state = {"model": {"w": w, "b": torch.ones(3)}, "step": step}
            mw.save_state_dict(state, tmp_path / "run" / f"step_{step:08}")

    mw.simulate(save, 2)
    return tmp_path / "run"


def json_output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_inspect_lists_the_contents(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step_00000002: meshwright, 2 tensors, 60 bytes, 2 files" in text
    assert "f32[4@tp, 3]" in text
    assert "ProcessMesh([tp=2])" in text
    assert main(["checkpoint", "inspect", str(run / "step_00000001"), "--json"]) == 0
    found = json_output(capsys)
    assert found["tensors"]["model.w"]["shape"] == [4, 3]
    assert found["values"] == {"step": "1"}
    assert found["world"] == 2
    assert found["versions"].keys() == {"meshwright", "torch"}


def test_verify_reports_whether_the_checkpoint_is_intact(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / "step_00000002"
    assert main(["checkpoint", "verify", str(step)]) == 0
    assert "complete; 2 tensors, checked by SHA-256" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(step), "--json"]) == 0
    assert json_output(capsys)["ok"]
    file = step / "rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x99")
    assert main(["checkpoint", "verify", str(step)]) == 1
    error = capsys.readouterr().err
    assert "tensor model.w was changed" in error
    assert "Traceback" not in error


def test_diff_names_the_differences(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(run / "step_00000001"), str(run / "step_00000002")
    assert main(["checkpoint", "diff", one, one]) == 0
    assert capsys.readouterr().out == "the same\n"
    assert main(["checkpoint", "diff", one, two]) == 1
    assert capsys.readouterr().out == "model.w: 11 of 12 elements differ, by at most 11\nstep: 1 and 2\n"
    assert main(["checkpoint", "diff", one, two, "--tolerance", "11", "--json"]) == 1
    assert json_output(capsys) == {"same": False, "differences": [{"name": "step", "what": "1 and 2"}]}


@pytest.mark.parametrize("prefix", ["model", "model."])
def test_convert_writes_another_form(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    hub = tmp_path / "hub"
    assert main(["checkpoint", "convert", str(run), str(hub), "--to", "safetensors", "--only", prefix]) == 0
    capsys.readouterr()
    found = load_file(hub / "model.safetensors")
    assert torch.equal(found["w"], torch.arange(12.0).reshape(4, 3) * 2)
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "own"), "--json"]) == 0
    told = json_output(capsys)
    assert (told["format"], told["tensors"], told["left_out"]) == ("meshwright", 2, 0)
    assert main(["checkpoint", "diff", str(run), str(tmp_path / "own")]) == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["inspect"], 2, "meshwright checkpoint inspect PATH"),
        (["diff", "a"], 2, "meshwright checkpoint diff PATH OTHER"),
        (["look", "a"], 2, "invalid choice: 'look'"),
        (["convert", "a", "b", "--to", "zip"], 2, "zip"),
        (["inspect", "nowhere"], 1, "no such file or folder"),
        (["verify", "nowhere"], 1, "no such file or folder"),
        (["diff", "nowhere", "nowhere"], 1, "no such file or folder"),
        (["convert", "RUN", "RUN"], 1, "never overwritten"),
        (["convert", "RUN", "NEW", "--to", "safetensors"], 1, "only tensors"),
        (["convert", "RUN", "NEW", "--only", "nothing"], 1, "begins with 'nothing.'"),
        (["convert", "RUN", "NEW", "--only", "mod"], 1, "begins with 'mod.'"),
        (["inspect", "a", "--jsn"], 2, "--json"),
    ],
)
def test_bad_input_gives_one_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    known = {"RUN": str(run), "NEW": str(tmp_path / "new")}
    assert main(["checkpoint", *[known.get(word, word) for word in words]]) == code
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert not (tmp_path / "new").exists()


def test_a_file_without_read_permission_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        (run / "step_00000002" / "manifest.json").unlink()
        (run / "step_00000002" / "manifest.json").mkdir()
    else:
        (run / "step_00000002" / "manifest.json").chmod(0)
    assert main(["checkpoint", "inspect", str(run / "step_00000002")]) == 1
    assert "manifest.json" in capsys.readouterr().err
