"""`meshwright doctor`: missing packages are reported with the command that installs them, and two ranks are tested."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli import main
from meshwright.cli.commands import doctor, doctor_devices
from meshwright.cli.ranks import self_check
from meshwright.conformance import Facts, Report, Result, keep_results
from meshwright.layout import _accelerator

TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\tSYS\t0-47\t0
GPU2\tNV18\tNV18\t X \tPHB\tSYS\t48-95\t1
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
"""


def findings_of(capsys: pytest.CaptureFixture[str]) -> Mapping[str, Any]:
    return {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


def test_conformance_was_never_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-check", "--json"]) == 0
    found = findings_of(capsys)["conformance"]
    assert (found["found"], found["state"]) == ("cpu: never run", "without")
    assert found["write"] == "run meshwright conformance --device cpu"


def test_the_latest_conformance_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts("cpu", 1, ("float32",), "x86_64", "2.13", "3.11", "Linux")
    keep_results(Report(facts, (Result(0, "a", "ok"), Result(1, "b", "ok"), Result(1, "c", "HUNG")), "2026-11-25"))
    keep_results(Report(facts, (Result(4, "d", "not run"),), "2026-11-26"))
    assert main(["doctor", "--no-check", "--json"]) == 0
    found = findings_of(capsys)["conformance"]
    assert found["found"] == (
        "cpu: levels 0, 1 on 2026-11-25: 2 ok, 1 HUNG (c); x86_64, torch 2.13; "
        "level 4 on 2026-11-26: 1 not run; x86_64, torch 2.13"
    )
    assert (found["state"], found["write"]) == ("without", "look at meshwright conformance --device cpu --level 1")


def test_links_are_those_that_the_driver_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_devices.links_in(TOPOLOGY) == (
        "3 of 6 pairs of GPUs by NVLink (NV18), "
        "2 of 6 pairs of GPUs by PCIe, through the link between processors (SYS), "
        "1 of 6 pairs of GPUs by PCIe, through the host bridge (PHB)"
    )
    for nothing in ("", "GPU0", "\tGPU0\tCPU Affinity\nGPU0\t X \t0-47", "Failed to initialize NVML"):
        assert doctor_devices.links_in(nothing) == ""
    monkeypatch.setattr(doctor_devices.shutil, "which", lambda name: None)
    assert list(doctor_devices.topology_findings()) == []

    def fail(*args: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(doctor_devices.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor_devices.subprocess, "run", fail)
    assert list(doctor_devices.topology_findings()) == []


def test_a_driver_without_a_build_of_torch_for_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_devices, "MODULES", tmp_path)
    assert list(doctor_devices.driver_findings(has_accelerator=False)) == []
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "version").write_text("570.86.15\n")
    (with_device,) = doctor_devices.driver_findings(has_accelerator=True)
    assert (with_device.found, with_device.state) == ("nvidia 570.86.15", "ok")
    (without,) = doctor_devices.driver_findings(has_accelerator=False)
    assert (without.found, without.state) == ("nvidia 570.86.15; torch sees no accelerator", "without")


def test_the_version_of_a_transport_is_that_of_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        version = staticmethod(lambda: (2, 27, 3))

    class Broken:
        version = staticmethod(lambda: 1 / 0)

    monkeypatch.setattr(torch.cpu, "transport", Library, raising=False)
    assert doctor_devices.transport_version("cpu", "transport") == "2.27.3"
    monkeypatch.setattr(torch.cpu, "transport", Broken)
    assert doctor_devices.transport_version("cpu", "transport") == ""
    assert doctor_devices.transport_version("cpu", "no_such_library") == ""
