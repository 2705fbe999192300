"""Asynchronous schedules in the static mode: the numbers of one device that applies the same delayed updates."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import meshwright as mw
from meshwright.engine import StrategyError
from meshwright.pipeline import ChunkMemory, StageError, peaks, schedule_by_name

from .oracle import Chain, batch, compare, laid, loss_of

runner_module: Any = import_module("meshwright.pipeline.runtime.runner")

STEPS = 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


def version_used(name: str, stages: int, stage: int, m: int) -> int:
    """Return the number of updates in the weights that a stage uses for microbatch m, by the papers' rule."""
    return max(0, m - (stages - 1 - stage)) if name == "PipeDream" else max(0, m // stages - 1)


def stage_of(parameter: str, stages: int) -> int:
    if parameter.startswith("blocks."):
        return int(parameter.split(".")[1])
    return 0 if parameter.startswith("entry") else stages - 1


def delayed(name: str, stages: int, microbatches: int, tied: bool, optimizer_of: str) -> list[Any]:
    """Return the results of one device on which each stage computes with weights of so many updates."""
    torch.manual_seed(1)
    model = Chain(stages, tied)
    optimizer = OPTIMIZERS[optimizer_of](model.parameters())
    group = 1 if name == "PipeDream" else stages
    losses: list[float] = []
    for step in range(STEPS):
        history = [_now(model)]
        total = 0.0
        for m, given in enumerate(zip(*(x.chunk(microbatches) for x in batch(step, 2 * microbatches)), strict=True)):
            *inputs, labels = given
            used = {
                n: history[version_used(name, stages, stage_of(n, stages), m)][n].requires_grad_() for n in history[0]
            }
            loss = loss_of(functional_call(model, used, tuple(inputs), tie_weights=False), labels)
            total += loss.item() / microbatches
            for n, grad in zip(used, torch.autograd.grad(loss / group, [*used.values()]), strict=True):
                p = model.get_parameter(n)
                p.grad = grad if p.grad is None else p.grad + grad
            if (m + 1) % group == 0:
                optimizer.step()
                optimizer.zero_grad()
                history.append(_now(model))
        losses.append(total)
    return [losses, {name: x.detach() for name, x in model.state_dict().items()}]


def _now(model: Chain) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def piped(
    name: str,
    stages: int,
    microbatches: int,
    tied: bool,
    optimizer_of: str,
    ranks_per_stage: int = 1,
    begin: Callable[[Any], Any] = lambda dist: None,
    then: Callable[[Any], Any] = lambda dist: None,
    **strategy: Any,
) -> list[Any]:
    torch.manual_seed(1)
    model = laid(Chain(stages, tied), range(stages), ranks_per_stage)
    optimizer = OPTIMIZERS[optimizer_of](model.parameters())
    options = {"enable": True, "schedule_mode": name, "accumulate_steps": microbatches, "asynchronous": True}
    dist = mw.to_static(
        model,
        None,
        lambda out, labels: loss_of(out, mw.reshard(labels, model.homes[-1], [mw.Replicate()])),
        optimizer,
        mw.Strategy.of(pipeline=options, **strategy),
    )
    begin(dist)
    losses = [dist(*given).item() for given in (batch(step, 2 * microbatches) for step in range(STEPS))]
    state = {key: mw.unshard_dtensor(x.detach()) for key, x in dist.state_dict("param").items()}
    return [losses, state, then(dist)]


@pytest.mark.parametrize("name", ["PipeDream", "PipeDream-2BW"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "tied", "optimizer_of"),
    [
        (2, 4, False, "SGD"),
        (2, 6, True, "momentum"),
        (2, 2, False, "AdamW"),
        (4, 8, False, "AdamW"),
        (4, 4, True, "SGD"),
    ],
)
def test_numbers_are_those_of_delayed_updates(
    name: str, stages: int, microbatches: int, tied: bool, optimizer_of: str
) -> None:
    expected = delayed(name, stages, microbatches, tied, optimizer_of)
    for found in mw.simulate(lambda: piped(name, stages, microbatches, tied, optimizer_of), stages):
        compare(found, expected)


@pytest.mark.parametrize(
    ("ranks_per_stage", "optimizer_of", "strategy"),
    [
        (2, "momentum", {"sharding": {"enable": True, "stage": 3, "least": 1}}),
        (2, "AdamW", {"foreach": False}),
        (1, "momentum", {"inplace": False}),
        (1, "SGD", {"compiler": "inductor"}),
    ],
)
def test_delayed_updates_with_other_options(ranks_per_stage: int, optimizer_of: str, strategy: dict[str, Any]) -> None:
    """Updates that write in place, by kernels, or to parts of parameters leave older versions unchanged."""
    expected = delayed("PipeDream", 2, 4, True, optimizer_of)
    found = mw.simulate(
        lambda: piped("PipeDream", 2, 4, True, optimizer_of, ranks_per_stage, **strategy), 2 * ranks_per_stage
    )
    for each in found:
        compare(each, expected)


@pytest.mark.parametrize(("name", "stages"), [("PipeDream", 4), ("PipeDream-2BW", 4), ("PipeDream", 2)])
def test_versions_live_as_long_as_in_the_table(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of older versions equal the checker's count, and none is left after the step."""
    most, left = [0] * stages, [0] * stages

    class Watched(runner_module.WeightStash):
        def keep(self, n: int, *given: Any) -> None:
            super().keep(n, *given)
            self._told()

        def drop(self, n: int) -> None:
            super().drop(n)
            self._told()

        def _told(self) -> None:
            own = {x.untyped_storage().data_ptr(): x.untyped_storage() for v in self.older.values() for x in v.values()}
            most[mw.get_rank()] = max(most[mw.get_rank()], left[mw.get_rank()])
            left[mw.get_rank()] = sum(x.nbytes() for x in own.values())

    monkeypatch.setattr(runner_module, "WeightStash", Watched)
    mw.simulate(lambda: piped(name, stages, 2 * stages, False, "momentum"), stages)
    sizes = [0] * stages
    for n, p in Chain(stages).named_parameters():
        sizes[stage_of(n, stages)] += p.nbytes
    table = schedule_by_name(name).make(stages, 2 * stages)
    assert tuple(most) == peaks(table, ChunkMemory(held=0.0, weights=tuple(map(float, sizes))))
    assert left == [0] * stages


def test_a_saved_step_is_loaded(tmp_path: Any) -> None:
    """Later steps are loaded from the folder; the first, whose updates are two programs, is recorded again."""

    def saved() -> Any:
        return piped("PipeDream", 2, 4, False, "momentum", then=lambda dist: dist.save(tmp_path))

    mw.simulate(saved, 2)

    def loaded() -> Any:
        return piped(
            "PipeDream",
            2,
            4,
            False,
            "momentum",
            begin=lambda dist: dist.load(tmp_path),
            then=lambda dist: dist.recordings,
        )

    for found in mw.simulate(loaded, 2):
        compare(found, delayed("PipeDream", 2, 4, False, "momentum"))
        assert found[2] == 1


class Counting(torch.optim.SGD):
    """SGD whose state is a Python number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                count = self.state[p].get("count", 0) + 1
                self.state[p]["count"] = count
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"schedule_mode": "1F1B"}, StrategyError, "one update"),
        ({"schedule_mode": "auto"}, StrategyError, "synchronous schedules"),
        ({"schedule_mode": "PipeDream", "amp": {"enable": True, "dtype": "float16"}}, StrategyError, "loss scale"),
        ({"schedule_mode": "PipeDream", "optimizer": Counting}, StageError, "creates anew"),
        ({"schedule_mode": "PipeDream", "asynchronous": False}, StageError, "asynchronous = true"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    options = {"asynchronous": True, **options}
    amp, optimizer = options.pop("amp", {}), options.pop("optimizer", torch.optim.SGD)

    def train() -> None:
        model = laid(Chain(2), (0, 1), 1)
        strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 4, **options}, amp=amp)
        dist = mw.to_static(
            model,
            None,
            lambda out, labels: loss_of(out, mw.reshard(labels, model.homes[-1], [mw.Replicate()])),
            optimizer(model.parameters(), lr=0.1),
            strategy,
        )
        dist(*batch(0, 8))

    with pytest.raises(error, match=says):
        mw.simulate(train, 2)


class Gates(torch.nn.Module):
    """A weight that is used only through a function: on the first stage, and on both if it is `shared`."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.gate, self.exit = torch.nn.Parameter(torch.linspace(-1, 1, 6)), torch.nn.Linear(6, 6)
        self.homes: list[mw.ProcessMesh] = []
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate.sigmoid()
        x = self.exit(self._to(1, self._to(0, x) * gate))
        return x * self._to(1, gate) if self.shared else x

    def _to(self, n: int, x: Tensor) -> Tensor:
        return mw.reshard(x, self.homes[n], []) if self.homes else x


def gated(model: Gates) -> list[Any]:
    model.homes = [mw.ProcessMesh([stage], ["pp"]) for stage in range(2)]
    options = {"enable": True, "schedule_mode": "PipeDream", "accumulate_steps": 4, "asynchronous": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    dist = mw.to_static(model, None, torch.nn.functional.mse_loss, optimizer, mw.Strategy.of(pipeline=options))
    return [dist(*rows()).item(), mw.unshard_dtensor(model.gate.detach())]


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    return torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)


def test_functions_of_weights_have_gradients_of_the_right_version() -> None:
    torch.manual_seed(0)
    model = Gates()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    gates, total = [model.gate.detach().clone()], 0.0
    for m, (x, y) in enumerate(zip(*(part.chunk(4) for part in rows()), strict=True)):
        used = gates[max(0, m - 1)].clone().requires_grad_()
        loss = torch.nn.functional.mse_loss(functional_call(model, {"gate": used}, (x,)), y)
        total += loss.item() / 4
        loss.backward()
        model.gate.grad = used.grad
        optimizer.step()
        optimizer.zero_grad()
        gates.append(model.gate.detach().clone())

    def train() -> list[Any]:
        torch.manual_seed(0)
        return gated(Gates())

    for loss, gate in mw.simulate(train, 2):
        assert loss == pytest.approx(total, rel=1e-5)
        torch.testing.assert_close(gate, gates[-1], rtol=1e-5, atol=1e-6)


def test_a_function_of_weights_that_stages_share_is_refused() -> None:
    with pytest.raises(StageError, match="newer weights"):
        mw.simulate(lambda: gated(Gates(shared=True)), 2)
