"""The terminal output while a program is recorded."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.engine.recording import recording_progress
from meshwright.engine.recording.recording_progress import RecordingPhases


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def _recorded(out: StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(recording_progress, "LEAST", 0.0)
    monkeypatch.setattr("sys.stderr", out)

    def step() -> None:
        net = nn.Linear(2, 2)
        model = mw.to_static(net, None, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
        model(torch.ones(1, 2), torch.ones(1, 2))
        model(torch.ones(1, 2), torch.ones(1, 2))

    mw.simulate(step, 2)
    return out.getvalue()


def test_one_rank_prints_the_phases_of_a_recording_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _recorded(_Terminal(), monkeypatch)
    assert text.count("train program of Linear made in") == 1
    assert all(phase in text for phase in ("capture", "complete layouts", "record", "passes"))


def test_nothing_is_printed_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _recorded(StringIO(), monkeypatch) == ""


def test_a_repeated_phase_adds_its_seconds() -> None:
    def twice() -> dict[str, float]:
        phases = RecordingPhases("program")
        for _ in range(2):
            with phases.phase("compile"):
                pass
        return phases.seconds

    (found,) = mw.simulate(twice, 1)
    assert [*found] == ["compile"]
    assert found["compile"] > 0
