"""Captured programs: results that are arguments are no writes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.graph import CaptureError, capture


def test_a_cast_to_the_same_dtype_writes_nothing() -> None:
    program = capture(nn.Identity(), lambda x: x.float() + 1, [torch.ones(3)]).program
    assert not program.writes


def test_a_loss_does_not_write_to_its_labels() -> None:
    program = capture(nn.Identity(), F.mse_loss, [torch.ones(3), torch.zeros(3)]).program
    assert not program.writes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(3)
        for at in range(len(x)):
            state = torch.tanh(self.cell(state + x[at]))
        return state


def test_a_loop_with_too_many_operators_is_refused_with_its_line() -> None:
    model = Recurrent()
    with pytest.raises(
        CaptureError, match=r"of at most 100 operators\n.*101 from .*test_capture\.py.*\n.*a Python loop"
    ):
        capture(model, model, [torch.ones(1000, 3)], most=100)
    assert len(capture(model, model, [torch.ones(5, 3)], most=100).program.nodes) <= 100


def test_shapes_that_do_not_fit_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch writes the error about tensors without elements to its log, and raises it as well."""
    module = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match=r"shapes|dim"):
        capture(module, module, (torch.ones(2, 5),))
    assert not caplog.records
    with pytest.raises(CaptureError, match="numbers"):
        capture(module, lambda x: module(x) + torch.zeros(x.argmax(), 1).sum(), (torch.ones(2, 4),))


def test_a_large_value_of_constants_alone_is_not_computed() -> None:
    """The masks of BigBird for 64 texts of 4,096 tokens took 51 GB."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.ones(2**22, 1), torch.arange(2**22).unsqueeze(0)
        assert columns[0, -1].item() == 2**22 - 1  # small values are known
        return x * (rows * columns).sum() * torch.eye(2**22).sum()

    captured = capture(nn.Identity(), masked, [torch.ones(3)], is_run=False)
    assert torch.ops.aten.mul.Tensor in [node.op for node in captured.program.nodes]


def test_an_operator_without_a_fake_form_is_computed_from_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.graph.captures.capture_environment.LARGE", 1000)

    @torch.library.custom_op("meshwright_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    captured = capture(nn.Identity(), lambda x: x * doubled(torch.arange(99)).sum(), [torch.ones(3)], is_run=False)
    assert torch.ops.aten.mul.Tensor in [node.op for node in captured.program.nodes]
