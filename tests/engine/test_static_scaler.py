"""A loss scale in programs: the numbers of torch's scaler in eager mode, on one device and on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

STEPS, ROW = 5, 7
MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
SCALE = {"init_loss_scaling": 1024.0, "incr_every_n_steps": 2}
StepReport = tuple[float, float]
"""Loss, and scale after the step."""
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "numbers": lambda ps: torch.optim.NAdam(ps, lr=0.01),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def batch(step: int, overflows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    if step in overflows:
        x[ROW] = 1e30  # a row of the last ranks of "dp"
    return x, torch.zeros(8, 8)


def whole(net: nn.Module) -> list[Tensor]:
    return [mw.unshard_dtensor(p.detach()).clone() for p in net.parameters()]


def eager(overflows: tuple[int, ...], make: Make = OPTIMIZERS["adamw"]) -> tuple[list[StepReport], list[list[Tensor]]]:
    """Return the results of torch's scaler on one device."""
    net = network()
    optimizer = make(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    told, parameters = list[StepReport](), list[list[Tensor]]()
    for step in range(STEPS):
        x, y = batch(step, overflows)
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append((loss.item(), scaler.get_scale()))
        parameters.append(whole(net))
    return told, parameters


def stepping(make: Make = OPTIMIZERS["adamw"], pipeline: bool = False, **options: Any) -> mw.DistModel:
    """Return a static model on two axes, of which the first shards the batch or the layers."""
    net = network()
    if pipeline:
        mw.split_pipeline(net, mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"]), ["2"])
    else:
        for layer, dim in ((net[0], 0), (net[2], 1)):
            layer.weight = mw.shard_tensor(layer.weight, MESH, [mw.Replicate(), mw.Shard(dim)])
        mw.shard_layer(net, MESH)
    amp = {"enable": True, "dtype": "float16", **SCALE}
    strategy = mw.Strategy.of(amp=amp, **options)
    return mw.to_static(net, None, F.mse_loss, make(net.parameters()), strategy)


def static(overflows: tuple[int, ...], **options: Any) -> tuple[list[StepReport], list[list[Tensor]]]:
    model = stepping(**options)
    told, parameters = list[StepReport](), list[list[Tensor]]()
    stages = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
    homes = (stages["pp", 0], stages["pp", 1]) if options.get("pipeline") else (MESH, MESH)
    for step in range(STEPS):
        x, y = batch(step, overflows)
        loss = model(*(mw.shard_tensor(t, mesh, [mw.Shard(0)]) for t, mesh in zip((x, y), homes, strict=True)))
        assert model.loss_scale is not None
        told.append((float(loss), model.loss_scale.get_scale()))
        parameters.append(whole(model.network))
    return told, parameters


def compare(found: Any, one: Any, rtol: float = 3e-3) -> None:
    for mine, theirs in zip(found[0], one[0], strict=True):
        assert mine == pytest.approx(theirs, rel=rtol, nan_ok=True)
    for mine, theirs in zip(found[1], one[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("overflows", [(), (2,), (0, 3)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharding": {"enable": True, "stage": 1, "least": 1}},
        {"sharding": {"enable": True, "stage": 2, "least": 1}},
        {"sharding": {"enable": True, "stage": 3, "least": 1}},
        {"foreach": False, "inplace": False},
        {"gradient_merge": {"enable": True, "k_steps": 2}},
        {"pipeline": {"enable": True, "accumulate_steps": 2}},
        {"make": OPTIMIZERS["momentum"]},
        {"make": OPTIMIZERS["numbers"]},
    ],
    ids=lambda o: "-".join(map(str, o)) or "plain",
)
def test_numbers_are_those_of_torchs_scaler_on_one_device(overflows: tuple[int, ...], options: Any) -> None:
    one = eager(overflows, options.get("make", OPTIMIZERS["adamw"]))
    for found in mw.simulate(lambda: static(overflows, **options), 4):
        compare(found, one)
        for step in overflows:
            before = found[1][step - 1] if step else None
            assert before is None or all(map(torch.equal, before, found[1][step])), "an update was left out"


def test_it_continues_from_torchs_scaler_and_back() -> None:
    """One step by programs starts with the state of torch's scaler, which then continues with their state."""

    def go() -> tuple[dict[str, Any], dict[str, Any]]:
        model = stepping()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        assert model.loss_scale is not None
        model.loss_scale.load_state_dict(scaler.state_dict())
        x, y = batch(0, ())
        for _ in range(3):
            model(mw.shard_tensor(x, MESH, [mw.Shard(0)]), y)
        found = model.loss_scale.state_dict()
        scaler.load_state_dict(found)
        model.loss_scale.load_state_dict(scaler.state_dict())
        return found, model.loss_scale.state_dict()

    for found, again in mw.simulate(go, 4):
        assert found == again
        assert (found["scale"], found["_growth_tracker"]) == (128.0, 1)


def test_a_checkpoint_holds_the_scale(tmp_path: Path) -> None:
    def go() -> tuple[Any, Any]:
        model = stepping()
        x, y = batch(0, ())
        given = mw.shard_tensor(x, MESH, [mw.Shard(0)])
        for _ in range(3):
            model(given, y)
        mw.save_checkpoint(tmp_path, 3, model)
        assert model.loss_scale is not None
        saved = model.loss_scale.state_dict(), float(model(given, y)), whole(model.network)
        other = stepping()
        mw.load_checkpoint(tmp_path, other)
        assert other.loss_scale is not None
        return saved, (other.loss_scale.state_dict(), float(other(given, y)), whole(other.network))

    for (scale, loss, saved), (scale_there, loss_there, loaded) in mw.simulate(go, 4):
        assert (scale, loss) == (scale_there, loss_there)
        assert all(map(torch.equal, saved, loaded))


def test_programs_with_a_scale_are_saved_and_loaded(tmp_path: Path) -> None:
    def go() -> tuple[list[float], int]:
        model = stepping()
        x, y = batch(0, ())
        given = mw.shard_tensor(x, MESH, [mw.Shard(0)])
        model.compile(given, y)
        model.save(tmp_path)
        other = stepping().load(tmp_path)
        return [float(m(given, y)) for m in (model, other) for _ in range(3)], other.recordings

    for losses, recordings in mw.simulate(go, 4):
        assert losses[:3] == losses[3:]
        assert recordings == 1, "the program of the first step is loaded, that with states recorded"


def test_evaluation_has_no_scale_and_gradients_of_half_parameters_are_refused() -> None:
    def go() -> None:
        model = stepping().eval()
        x, y = batch(0, ())
        model(mw.shard_tensor(x, MESH, [mw.Shard(0)]), y)
        assert all(i.role != "state" for i in model.program.inputs)
        linear, strategy = nn.Linear(8, 8).half(), mw.Strategy.of(amp={"enable": True, "dtype": "float16"})
        half = mw.to_static(linear, None, F.mse_loss, torch.optim.SGD(linear.parameters(), lr=0.1), strategy)
        with pytest.raises(mw.MeshwrightError, match="parameter in float16"):
            half.train()(x.half(), y.half())

    mw.simulate(go, 4)


def test_small_gradients_survive_only_with_the_scale() -> None:
    """The gradients are too small for float16: without the scale nothing would change."""

    def moved(scale: float) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = [p.detach().clone() for p in net.parameters()]
        amp = {"enable": True, "dtype": "float16", "init_loss_scaling": scale}
        sgd = torch.optim.SGD(net.parameters(), lr=1e6)
        model = mw.to_static(net, None, lambda out, _: out.float().sum() * 1e-9, sgd, mw.Strategy.of(amp=amp))
        model(torch.ones(2, 4), torch.ones(1))
        return max(float((p.detach() - b).abs().max()) for p, b in zip(net.parameters(), before, strict=True))

    ((small, large),) = mw.simulate(lambda: (moved(1.0), moved(65536.0)), 1)
    assert small == 0.0
    assert large > 0.0
