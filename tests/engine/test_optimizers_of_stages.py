"""Static pipelines with optimizers that have no parameters of some stages."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw


def with_parameters_of(places: slice, in_stages: bool) -> list[torch.Tensor]:
    """Return the parameters after two steps of an optimizer that has some of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x, y, loss = torch.randn(4, 4), torch.randn(4, 4), torch.nn.functional.mse_loss
    if in_stages:
        mw.split_pipeline(model, mw.ProcessMesh([0, 1], ["pp"]))
    optimizer = torch.optim.AdamW(list(model.parameters())[places], lr=0.1)
    if in_stages:
        strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2, "schedule_mode": "1F1B"})
        step = mw.to_static(model, None, loss, optimizer, strategy)
        for _ in range(2):
            step(x, y)
        return [mw.unshard_dtensor(p.detach()) for p in model.parameters()]
    for _ in range(2):
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("places", [slice(0, 2), slice(2, 4)])
def test_an_optimizer_may_have_parameters_of_one_stage_only(places: slice) -> None:
    one = with_parameters_of(places, in_stages=False)
    for found in mw.simulate(lambda: with_parameters_of(places, in_stages=True), 2):
        torch.testing.assert_close(found, one)
