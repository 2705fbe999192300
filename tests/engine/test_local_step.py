"""An optimizer step on local parts equals that of one device; if it is impossible, it runs operator by operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine.eager.local_step import ELEMENTWISE

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
CUTS = [[mw.Shard(0), mw.Replicate()], [mw.Shard(1), mw.Shard(0)], [mw.Replicate(), mw.Replicate()]]
SHAPES = [(5, 3), (3, 7), (4,)]
OPTIONS: dict[type, list[dict[str, Any]]] = {
    torch.optim.SGD: [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    torch.optim.Adam: [{"amsgrad": True}, {"maximize": True}, {"foreach": True}],
    torch.optim.AdamW: [{"lr": torch.tensor(0.1)}, {"foreach": True}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.5}],
}


def make(lay: bool) -> list[Tensor]:
    torch.manual_seed(0)
    whole = [torch.randn(shape) for shape in SHAPES]
    if lay:
        cuts = [CUTS[0], CUTS[1], [mw.Shard(0), mw.Replicate()]]
        whole = [mw.shard_tensor(x, MESH, cut) for x, cut in zip(whole, cuts, strict=True)]
    return [nn.Parameter(x) for x in (*whole, torch.ones(2))]


def steps(kind: type, options: dict[str, Any], lay: bool) -> tuple[list[Tensor], list[bool]]:
    """Return the parameters after four steps, and whether each step used local parts."""
    parameters = make(lay)
    optimizer = kind(parameters, **options)
    on_parts: list[bool] = []
    optimizer.register_step_post_hook(lambda of, args, _: on_parts.append(args[0] is not of))
    for step in range(4):
        loss = sum(
            ((p - step) ** 2).mean() for p in parameters[: 3 if step == 1 else 4]
        )  # one parameter has no gradient in one step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [mw.unshard_dtensor(p).detach() if lay else p.detach() for p in parameters], on_parts


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_it_is_the_step_of_one_device(kind: type) -> None:
    for options in [{}, *OPTIONS.get(kind, [])]:
        one, _ = steps(kind, options, False)
        for found, on_parts in mw.simulate(steps, 4, kind, options, True):
            assert on_parts[1:] == [True] * 3, options
            for a, b in zip(one, found, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Other(torch.optim.SGD):
    """An optimizer with an unknown step."""


@pytest.mark.parametrize(("kind", "options"), [(Other, {"lr": 0.1}), (torch.optim.ASGD, {})])
def test_other_optimizers_run_operator_by_operator(kind: type, options: dict[str, Any]) -> None:
    one, _ = steps(kind, options, False)
    for found, on_parts in mw.simulate(steps, 4, kind, options, True):
        assert not any(on_parts)
        for a, b in zip(one, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_error_in_a_step_keeps_tensors_distributed() -> None:
    def go() -> Any:
        parameters = make(True)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        sum(p.sum() for p in parameters).backward()
        optimizer.param_groups[0]["weight_decay"] = "much"
        with pytest.raises(TypeError):
            optimizer.step()
        return parameters[0].shape

    assert mw.simulate(go, 4) == [(5, 3)] * 4


def test_hooks_and_schedulers_get_the_optimizer() -> None:
    def go() -> Any:
        parameters = make(True)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        seen: list[int] = []
        optimizer.register_step_pre_hook(lambda of, *_: seen.append(len(of.param_groups[0]["params"])))
        optimizer.register_step_post_hook(lambda of, *_: seen.append(len(of.param_groups[0]["params"])))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            sum(p.sum() for p in parameters).backward()
            optimizer.step()
            scheduler.step()
        return seen, scheduler.get_last_lr()

    seen, rates = mw.simulate(go, 4)[0]
    assert seen == [4] * 4
    assert rates == pytest.approx([0.001])


def test_a_recorded_program_is_reused_after_eager_steps() -> None:
    def go() -> int:
        net = mw.shard_layer(nn.Linear(4, 4), MESH)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        static = mw.to_static(net, None, nn.functional.mse_loss, optimizer)
        for _ in range(2):
            static(torch.ones(8, 4), torch.ones(8, 4))
            net(torch.ones(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return static.recordings

    assert mw.simulate(go, 4) == [1] * 4
