"""Training by programs: optimizers, schedules, states, and the change to eager mode, evaluation, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.graph import communication

from .oracle import STYLES, compare, whole
from .static_oracle import Base, BatchNorm, Job, Make, check, eager, laid, normed, numbers, same_as_eager, sgd


class Counting(torch.optim.Optimizer):
    """A user-defined optimizer, with a counter that is a Python number and an option that is a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "scale": torch.tensor(2.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(p.grad * group["scale"], alpha=group["lr"] / state["steps"] ** 0.5)


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two groups; the second has a lower rate and a larger decay."""
    first, *rest = parameters
    groups = [{"params": [first]}, {"params": rest, "lr": 0.01, "weight_decay": 0.1}]
    return mw.shard_optimizer(torch.optim.AdamW(groups, lr=0.1))


def clipped(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that clips gradients before each step."""

    def clip(optimizer: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

    out = torch.optim.SGD(parameters, lr=0.1)
    out.register_step_pre_hook(clip)
    return out


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, eps=1e-3),
    "AdamW": in_groups,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, eps=(1e-3, 1e-3)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "a tensor as learning rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False, eps=1e-3),
    "clipped gradients": clipped,
    "one of the user's": Counting,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_rules_of_optimizers(name: str) -> None:
    check(Job(Base, numbers), STYLES["columns"] if name != "Adafactor" else STYLES["rows"], OPTIMIZERS[name])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "warm-up from nothing": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(step / 2, 1.0)),
    "one cycle, of momenta too": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    def run(how: str) -> Any:
        torch.manual_seed(3)
        module = Base() if how == "one device" else laid(Base(), STYLES["rows"])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        step: Any = mw.to_static(module, None, None, optimizer) if how == "static" else eager(module, optimizer)
        losses: list[Tensor] = []
        for seed in range(4):
            losses.append(step(*numbers(seed)))
            schedule.step()
        if how == "static" and "nothing" in name:
            assert step.recordings == 1  # the momenta are 0 before the first step
        return whole([losses, dict(module.state_dict())])

    wanted = run("one device")
    mw.simulate(lambda: compare(run("static"), wanted, {"rtol": 1e-4, "atol": 1e-6}), 4)


def test_loaded_states_continue_in_both_modes() -> None:
    def run(static: bool) -> Any:
        torch.manual_seed(3)
        module = laid(BatchNorm(), STYLES["rows"])
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-2)
        eagerly = eager(module, optimizer)
        model = mw.to_static(module, None, None, optimizer)
        step: Any = model if static else eagerly
        batch = [normed(seed) for seed in range(8)]
        losses = [step(*batch[0]), step(*batch[1])]
        kept = {name: {k: v.clone() for k, v in state.items()} for name, state in enumerate(optimizer.state.values())}
        losses += [eagerly(*batch[2]), step(*batch[3])]
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "state": kept})
        losses.append(step(*batch[4]))
        module.layers[1].eval()
        losses.append(step(*batch[5]))
        module.layers[5].weight.requires_grad_(False)
        losses.append(step(*batch[6]))
        module.layers[1].momentum = 0.5
        module.layers[1].train()
        losses.append(step(*[x[:4] for x in batch[7]]))
        return whole([losses, dict(module.state_dict()), list(optimizer.state.values())])

    mw.simulate(lambda: compare(run(True), run(False), {"rtol": 1e-4, "atol": 1e-6}), 4)


def test_training_evaluation_and_prediction() -> None:
    def go() -> None:
        torch.manual_seed(3)
        style = STYLES["rows"]
        network = laid(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), style)
        model = mw.to_static(network, None, F.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1))
        other = mw.to_static(network, None, F.cross_entropy)
        x, y = numbers(0)[0], torch.tensor([0, 1, 2, 3, 0, 1])
        assert (model.mode, other.mode) == ("train", "eval")
        model(x, y)
        before = whole(dict(network.state_dict()))
        assert torch.equal(model.eval()(x, y), whole(F.cross_entropy(network(x), y)))
        assert torch.equal(model.predict()(x), whole(network(x)))
        assert torch.equal(other(x, y), model.eval()(x, y))
        compare(whole(dict(network.state_dict())), before, {"rtol": 0.0, "atol": 0.0})
        recorded = model.recordings
        model.train()(x, y)
        model.eval()(x, y)
        assert model.recordings == recorded
        assert sorted(model.state_dict("param")) == sorted(network.state_dict())
        assert network.training is False

    mw.simulate(go, 4)


def test_nothing_is_allocated_to_record_a_model() -> None:
    def go() -> int:
        with torch.device("meta"):
            network = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.GELU(), nn.Linear(1 << 20, 1 << 20))  # 4 TiB each
        mw.shard_layer(network, mw.ProcessMesh([0, 1], ["tp"]))
        optimizer = torch.optim.AdamW(network.parameters())
        model = mw.to_static(network, None, F.mse_loss, optimizer)
        x = torch.empty(4, 1 << 20, device="meta")
        return len(model.compile(x, x).nodes)

    assert min(mw.simulate(go, 2)) > 20


def test_there_are_no_more_collectives_than_in_eager_mode() -> None:
    def go() -> None:
        module = laid(Base(), STYLES["grid"])
        optimizer = sgd(module.parameters())
        with current_communicator().seen.record_calls() as wanted:
            eager(module, optimizer)(*numbers(0))
        model = mw.to_static(module, None, None, optimizer)
        model(*numbers(0))
        with current_communicator().seen.record_calls() as found:
            model(*numbers(0))
        assert len(found) <= len(wanted)
        assert len(found) == len(list(communication(model.program)))

    mw.simulate(go, 4)


def test_the_user_chooses_the_layout_of_states() -> None:
    """ZeRO by `shard_optimizer`: states are sharded, parameters are not."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return mw.shard_optimizer(
            torch.optim.Adam(parameters, lr=0.1, eps=1e-3), lambda key, p, state: [mw.Shard(0)] if p.dim() > 1 else None
        )

    same_as_eager(Job(Base, numbers), STYLES["whole"], make)


def test_running_statistics_of_uneven_channels() -> None:
    """The first channel of a rank is a number that no program may read: the last rank has fewer channels."""

    def train(mesh: mw.ProcessMesh | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        if mesh is not None:
            net[0].weight = mw.shard_tensor(net[0].weight, mesh, [mw.Shard(0)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        static = mw.to_static(net, None, nn.functional.mse_loss, optimizer) if mesh is not None else None
        for _ in range(2):
            loss = static(x, y) if static is not None else nn.functional.mse_loss(net(x), y)
            if static is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [mw.unshard_dtensor(t).detach() for t in (loss, net[1].running_mean, net[1].running_var)]

    one = train(None)
    for found in mw.simulate(train, 3, mw.ProcessMesh([0, 1, 2], ["tp"])):
        for a, b in zip(found, one, strict=True):
            torch.testing.assert_close(a, b)
