"""Calls with arguments in the order of version 0.1 give the same result, and warn."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["tp"])


def losses(former: bool) -> list[float]:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 2), (torch.ones(8, 4), torch.zeros(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = (optimizer, [batch], mse_loss) if former else ([batch], mse_loss, optimizer)
    step = cast(Any, mw.auto)(model, *arguments)
    return [step(*batch).item() for _ in range(2)]


def test_auto_accepts_the_former_order() -> None:
    with pytest.warns(DeprecationWarning, match=r"mw\.auto\(model, loader, loss, optimizer\)"):
        former = mw.simulate(losses, 2, True)
    assert former == mw.simulate(losses, 2, False)


def test_verify_accepts_the_former_order() -> None:
    plan = mw.Parallelism({"": mw.ColwiseParallel()})
    with pytest.warns(DeprecationWarning, match=r"mesh=mesh, marks=marks"):
        assert cast(Any, mw.verify)(nn.Linear(4, 2), [torch.ones(5, 4)], MESH, plan).equal
    assert mw.verify(nn.Linear(4, 2), [torch.ones(5, 4)], mesh=MESH, marks=plan).equal
