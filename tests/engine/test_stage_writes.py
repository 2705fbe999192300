"""Writes in place with operands of several stages of a pipeline, or plain ones: the values of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.tensor import MixedMeshError

Program = Callable[[Any, Any], Any]
"""A program of a layer of each stage, which have a weight, a bias and a running mean and variance."""
PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


@program
def a_table_with_a_largest_norm(one: Any, two: Any) -> Any:
    return F.embedding((two.bias.detach() * 0).long(), one.weight.detach(), max_norm=0.1), one.weight


@program
def a_plain_table_with_a_largest_norm(one: Any, two: Any) -> Any:
    table = torch.ones(3, 4)
    return F.embedding((two.bias.detach() * 0).long(), table, max_norm=0.1), table


@program
def statistics_of_another_stage(one: Any, two: Any) -> Any:
    out = F.batch_norm(two.weight.detach(), one.running_mean, one.running_var, training=True, momentum=0.3)
    return out, one.running_mean, one.running_var


@program
def plain_statistics(one: Any, two: Any) -> Any:
    mean, variance = torch.zeros(4), torch.ones(4)
    F.batch_norm(two.weight.detach(), mean, variance, training=True, momentum=0.3)
    return mean, variance


@program
def lists_with_a_number_of_one_stage(one: Any, two: Any) -> Any:
    held = [one.bias.detach().clone(), two.bias.detach().clone()]
    torch._foreach_mul_(held, two.weight.detach().sum())
    return held


@program
def plain_lists(one: Any, two: Any) -> Any:
    held = [torch.zeros(4), torch.ones(4)]
    torch._foreach_add_(held, [one.bias.detach(), two.bias.detach()])
    torch._foreach_lerp_(held, [two.bias.detach(), one.bias.detach()], 0.5)
    return held


@program
def plain_sums(one: Any, two: Any) -> Any:
    total, found, rows = torch.zeros(()), torch.zeros(4), torch.zeros(4, 4)
    total += two.bias.detach().sum()
    torch.add(found, two.bias.detach(), out=found)
    torch.maximum(found, one.bias.detach(), out=found)
    found[1] = one.bias.detach()[2]
    rows[1:3].add_(two.weight.detach()[1:3])
    rows.data.view(-1)[2:6].copy_(two.bias.data)
    return total, found, rows


@program
def a_plain_sum_with_a_gradient(one: Any, two: Any) -> Any:
    total = torch.zeros(())
    total += one.weight.square().sum()
    total += two.weight.square().sum()
    total.backward()
    return total, one.weight.grad, two.weight.grad


@program
def comparisons(one: Any, two: Any) -> Any:
    norms = [x.abs().max() for x in (one.weight, two.weight, one.bias, two.bias)]
    return max(norms), min(norms), one.bias < two.bias, two.bias >= one.bias, one.bias == two.bias, two.bias != one.bias


@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_have_the_values_of_one_device(name: str) -> None:
    want = _results(PROGRAMS[name], False)
    for found in mw.simulate(lambda: _results(PROGRAMS[name], True), 2):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_a_function_that_writes_to_a_stage_and_to_a_plain_tensor_is_refused() -> None:
    def observe() -> None:
        one, two = _layers(True)
        least, on = one.bias.detach()[:1], torch.tensor([1])
        rest = least.clone(), torch.ones(1), torch.zeros(1, dtype=torch.int32)
        torch.fused_moving_avg_obs_fake_quant(two.weight.detach(), on, on, least, *rest, 0.1, 0, 255, -1)

    with pytest.raises(MixedMeshError, match="would be lost"):
        mw.simulate(observe, 2)


def _layers(in_stages: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    for at in (0, 2):
        vars(net[at])["_buffers"].update(net[at + 1].named_buffers())
    if in_stages:
        mw.split_pipeline(net, mw.ProcessMesh([0, 1], ["pp"]), at=["2"])
    return net[0], net[2]


def _results(run: Program, in_stages: bool) -> list[Tensor]:
    found: list[Tensor] = []

    def take(x: Any) -> None:
        if isinstance(x, Tensor):
            found.append(mw.unshard_dtensor(x.detach()).clone())
        else:
            for each in x:
                take(each)

    take(run(*_layers(in_stages)))
    return found
