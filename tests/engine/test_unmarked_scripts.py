"""Scripts without a mark: modules are planned at their first call, with the numbers of one device."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cli import main
from meshwright.cost import cluster
from meshwright.engine import unmarked

pytestmark = pytest.mark.usefixtures("forked_processes")

EXAMPLES = Path(__file__).parents[2] / "examples"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))) * scale


def train() -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    losses: list[float] = []
    for rows in (8, 12, 8):
        x, y = (torch.randn(rows, n) for n in (8, 4))
        loss = nn.functional.mse_loss(model(x, scale=torch.ones(4) * 2), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, [mw.unshard_dtensor(x.detach()) for x in model.state_dict().values()]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_are_those_of_one_device(ranks: int, capfd: pytest.CaptureFixture[str]) -> None:
    with unmarked():
        found = mw.simulate(train, ranks)
    for each in found:
        torch.testing.assert_close(each, train(), rtol=1e-5, atol=1e-5)
    assert capfd.readouterr().err.count("Net on ") == 1


def test_a_module_with_marks_is_not_planned() -> None:
    def go() -> Any:
        model = mw.shard_layer(nn.Linear(4, 4), mw.ProcessMesh([0, 1], ["x"]))
        model(torch.ones(2, 4))
        return model.weight.mesh.dim_names

    with unmarked():
        assert mw.simulate(go, 2) == [("x",)] * 2


SCRIPT = str(EXAMPLES / "llama_one_device.py")


@pytest.mark.parametrize("options", [[], ["--processes"]])
def test_a_script_for_one_device_runs_on_many(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(SCRIPT, run_name="__main__")
    printed_alone = capfd.readouterr().out
    assert main(["run", "--ranks", "2", "--auto", *options, SCRIPT]) == 0
    assert capfd.readouterr().out == printed_alone


def test_options_that_a_script_does_not_get_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with unmarked():
        mw.simulate(train, 2)
    assert "gets shardings only, without ZeRO" in capfd.readouterr().err


def test_a_script_that_does_not_fit_gets_a_suggestion() -> None:
    machines = cluster("2xH100")
    tiny = replace(machines, device=replace(machines.device, memory=4e3))
    with unmarked(tiny), pytest.raises(mw.MeshwrightError, match=r"shardings only.*\n.*mw\.auto\(model"):
        mw.simulate(train, 2)
