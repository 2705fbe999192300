"""`meshwright doctor`: missing packages are reported with the command that installs them, and two ranks are tested."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from meshwright.cli import main
from meshwright.cli.commands import doctor
from meshwright.cli.ranks import self_check
from meshwright.layout import _accelerator


def findings_of(capsys: pytest.CaptureFixture[str]) -> Mapping[str, Any]:
    return {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


def test_a_complete_installation_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-check"]) == 0
    out = capsys.readouterr().out
    assert "ready" in out
    assert all(word in out for word in ("torch", "numpy", "safetensors", "rich", "gloo", "devices", "C++ compiler"))


def test_a_missing_requirement_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"torch": "2.9.1+cpu", "rich": None, "ortools": None}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "99"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  torch" in out
    assert "pip install 'torch" in out
    assert "pip install 'rich" in out
    assert "without  ortools (solver)" in out
    assert "pip install 'meshwright[solver]'  (optional)" in out
    assert "simulated" not in out


def test_a_platform_that_cannot_be_imported_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoint("vdev", "no_such_package:PLATFORM", _accelerator.ENTRY_POINTS)
    monkeypatch.setattr(_accelerator, "entry_points", lambda group: (broken,))
    monkeypatch.setattr(_accelerator, "_entry_points", _accelerator._EntryPoints())
    assert main(["doctor", "--json"]) == 1
    found = findings_of(capsys)["platforms"]
    assert "no_such_package" in found["found"]
    assert "uninstall" in found["write"]


def test_two_ranks_are_tested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("meshwright.comm.launch", lambda argv, ranks, timeout: started.append(argv) or 3)
    assert main(["doctor", "--json"]) == 1
    found = findings_of(capsys)
    assert found["two simulated ranks"]["good"]
    assert "exit code 3" in found["two processes"]["found"]
    assert started == [["-m", "meshwright.cli.ranks.self_check"]]


def test_a_wrong_matrix_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, seen = self_check._step, []

    def wrong(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(x)
        out, of_x, of_w = right(x, w)
        return out, of_x, of_w * (1 if type(x) is torch.Tensor else 2)

    assert self_check.check_simulated() == ""
    monkeypatch.setattr(self_check, "_step", wrong)
    assert "gradient of w" in self_check.check_simulated()
