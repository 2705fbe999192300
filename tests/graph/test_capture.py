"""What capture writes down: results that are arguments are no writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.graph import capture


def test_a_cast_that_changes_nothing_writes_nothing() -> None:
    program = capture(nn.Identity(), lambda x: x.float() + 1, [torch.ones(3)]).program
    assert not program.writes


def test_a_loss_leaves_its_labels_alone() -> None:
    program = capture(nn.Identity(), F.mse_loss, [torch.ones(3), torch.zeros(3)]).program
    assert not program.writes
