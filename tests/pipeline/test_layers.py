"""Pipelines of layers with buffers that they read and update, dropout, gates made of weights, and skip connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.pipeline import StageError


class Centred(nn.Module):
    """Subtracts a running mean of all batches; has a flag and a counter, too."""

    mean: Tensor
    seen: Tensor
    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("mean", torch.zeros(6)), ("seen", torch.tensor(0)), ("used", torch.zeros(2))):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.seen += 1
            self.used.fill_(1.0)
        return x - self.mean


class Scaled(Centred):
    """Multiplies by that mean: a value of each microbatch is read by its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * self.mean


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(6)


class Gated(nn.Module):
    """A skip connection from two layers before, and a gate that depends on no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate) + first


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "centred": Centred, "scaled": Scaled, "noisy": Noisy,
    "dropped": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)), "gated": Gated,
    "norm": lambda: nn.BatchNorm1d(6),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)

    def forward(self, x: Tensor) -> Tensor:
        done = [x, x]
        for layer in self.layers:
            x = layer(x, done[-2]) if isinstance(layer, Gated) else layer(x)
            done.append(x)
        return x


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)) for _ in range(2)]


def train_on_one_device(names: tuple[str, ...], microbatches: int) -> list[Any]:
    torch.manual_seed(1)
    net = Net(names)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    losses: list[float] = []
    for x, y in batches():
        pairs = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
        total = 0.0
        for a, b in pairs:
            loss = nn.functional.mse_loss(net(a), b) / microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return [losses, net.state_dict(), torch.rand(1)]


def piped(
    names: tuple[str, ...], mode: str, way: tuple[int, ...], microbatches: int, replicas: int = 1, **strategy: Any
) -> list[Any]:
    torch.manual_seed(1)
    net = Net(names)
    stages = max(way) + 1
    mesh = mw.ProcessMesh(torch.arange(stages * replicas).reshape(stages, replicas).tolist(), ["pp", "dp"])
    starts = [f"layers.{n * len(names) // len(way)}" for n in range(1, len(way))]
    mw.split_pipeline(net, mesh, at=starts, way=way, batch=[mw.Shard(0)])
    options = {"enable": True, "schedule_mode": mode, "accumulate_steps": microbatches}
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    strategy = {"pipeline": options, **strategy}
    step = mw.to_static(net, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(**strategy))
    losses = [step(x, y).item() for x, y in batches()]
    return [losses, {name: mw.unshard_dtensor(x.detach()) for name, x in net.state_dict().items()}, torch.rand(1)]


KEPT = {"recompute": {"enable": True, "budget": 0.5}}
AGAIN = {"recompute": {"enable": True, "layers": ["layers.*"]}}
FOUR: tuple[str, ...] = ("linear", "linear", "linear", "linear")
CASES: list[tuple[tuple[str, ...], str, tuple[int, ...], int, int, dict[str, Any]]] = [
    (("linear", "linear", "centred", "centred"), "Interleaved 1F1B", (0, 1, 0, 1), 4, 1, {}),
    (("centred", "linear", "linear", "centred"), "ZB-V", (0, 1, 1, 0), 4, 1, {}),
    (("linear", "centred"), "1F1B", (0, 1), 1, 2, {}),
    (("dropped", "noisy", "dropped", "noisy"), "ZB-V", (0, 1, 1, 0), 4, 1, {}),
    (("linear", "linear", "gated", "gated"), "ZB-V", (0, 1, 1, 0), 4, 1, {}),
    (("linear", "linear", "gated", "gated"), "V-Half", (0, 1, 1, 0), 2, 1, {}),
    (FOUR, "ZB-V", (0, 1, 1, 0), 4, 1, KEPT),
    (("linear", "gated", "gated", "linear"), "1F1B", (0, 1), 4, 1, KEPT),
    (("linear", "scaled"), "GPipe", (0, 1), 4, 1, AGAIN),
    (("centred", "norm", "linear", "dropped"), "ZB-V", (0, 1, 1, 0), 4, 1, AGAIN),
]


@pytest.mark.parametrize(("names", "mode", "way", "microbatches", "replicas", "strategy"), CASES)
def test_numbers_are_those_of_one_device(
    names: tuple[str, ...], mode: str, way: tuple[int, ...], microbatches: int, replicas: int, strategy: dict[str, Any]
) -> None:
    losses, state, drawn = train_on_one_device(names, microbatches)
    ranks = (max(way) + 1) * replicas
    for found in mw.simulate(lambda: piped(names, mode, way, microbatches, replicas, **strategy), ranks):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found[1], dict(state), rtol=1e-5, atol=1e-6)
        assert found[2] == drawn


class Shared(nn.Module):
    """One buffer in the first and in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        centred = Centred()
        self.layers = nn.ModuleList([centred, nn.Linear(6, 6), nn.Linear(6, 6), centred])
        self.homes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer, home in zip(self.layers, self.homes, strict=True):
            x = layer(mw.pipe_split(x) if home is None else mw.reshard(x, home, []))
        return x


def test_a_buffer_with_another_order_of_microbatches_is_refused() -> None:
    def step() -> None:
        net = Shared()
        mesh = mw.ProcessMesh([0, 1], ["pp"])
        net.homes = [mesh["pp", 0], mesh["pp", 1], None, mesh["pp", 0]]
        options = {"enable": True, "schedule_mode": "ZB-V", "accumulate_steps": 4}
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        mw.to_static(net, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(pipeline=options))(*batches()[0])

    with pytest.raises(StageError, match="layers_0_mean"):
        mw.simulate(step, 2)


class Averaged(nn.Module):
    """A moving average of the last stage's output, in a buffer of the model or of its last layer."""

    def __init__(self, in_layer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        owner = self.last if in_layer else self
        owner.register_buffer("mean", torch.zeros(4))
        self.in_layer = in_layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x))
        mean = self.last.mean if self.in_layer else self.mean
        mean += 0.1 * (out.detach().mean(0) - mean)
        return (out - mean).square().mean()


def averages(in_layer: bool, microbatches: int, mesh: mw.ProcessMesh | None) -> list[Tensor]:
    net = Averaged(in_layer) if mesh is None else mw.split_pipeline(Averaged(in_layer), mesh, at=["last"])
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    x = torch.linspace(-1, 1, 16).view(4, 4)
    if mesh is None:
        for part in x.chunk(microbatches):
            (net(part) / microbatches).backward()
        optimizer.step()
    else:
        options = {"enable": True, "accumulate_steps": microbatches}
        mw.to_static(net, None, None, optimizer, mw.Strategy.of(pipeline=options))(x)
    return [mw.unshard_dtensor(x.detach()) for x in net.state_dict().values()]


@pytest.mark.parametrize(("in_layer", "microbatches"), [(False, 1), (True, 1), (True, 2)])
def test_a_later_stage_updates_a_buffer(in_layer: bool, microbatches: int) -> None:
    for found in mw.simulate(lambda: averages(in_layer, microbatches, mw.ProcessMesh([0, 1], ["pp"])), 2):
        torch.testing.assert_close(found, averages(in_layer, microbatches, None), rtol=1e-5, atol=1e-6)


def test_a_buffer_that_the_next_microbatch_reads_too_early_is_refused() -> None:
    with pytest.raises(StageError, match="the buffer %mean, which chunks 0 and "):
        mw.simulate(lambda: averages(False, 2, mw.ProcessMesh([0, 1], ["pp"])), 2)


class Replaced(Averaged):
    """The first stage reads a buffer that the last stage replaces."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.first(x - self.mean))
        self.mean = out.detach().mean(0)
        return out.square().mean()


def test_a_buffer_of_an_early_stage_that_a_later_one_replaces_is_refused() -> None:
    def step() -> None:
        net = mw.split_pipeline(Replaced(False), mw.ProcessMesh([0, 1], ["pp"]), at=["last"])
        options = {"enable": True, "accumulate_steps": 2}
        mw.to_static(net, None, None, torch.optim.SGD(net.parameters(), 0.5), mw.Strategy.of(pipeline=options))(
            torch.linspace(-1, 1, 16).view(4, 4)
        )

    with pytest.raises(StageError, match="chunks 0 and 1 on different ranks"):
        mw.simulate(step, 2)


class Rows(nn.Module):
    """Two products on two stages; the first weight is sharded by rows, so that its result is a pending sum."""

    def __init__(self, homes: list[mw.ProcessMesh] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.homes = homes
        if homes:
            self.first = mw.shard_tensor(self.first, homes[0], [mw.Shard(0)])

    def forward(self, x: Tensor) -> Tensor:
        if self.homes is None:
            return (x @ self.first).tanh() @ self.second
        x = mw.reshard(x, self.homes[0], [mw.Shard(1)]) @ self.first
        return mw.reshard(x, self.homes[1], [mw.Shard(1)]).tanh() @ self.second


def test_conversions_run_on_their_own_side_of_a_message() -> None:
    """The sum is reduced on the ranks of its terms, and its gradient comes back to them."""

    def step(homes: list[mw.ProcessMesh] | None) -> tuple[float, Tensor]:
        net = Rows(homes)
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        x, y = batches()[0]
        if homes is None:
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.item(), net.first.detach()
        options = {"enable": True, "schedule_mode": "1F1B", "accumulate_steps": 2}
        loss = mw.to_static(net, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(pipeline=options))(x, y)
        return loss.item(), mw.unshard_dtensor(net.first.detach())

    homes = [mw.ProcessMesh([0, 1], ["tp"]), mw.ProcessMesh([2, 3], ["tp"])]
    loss, weight = step(None)
    for found, updated in mw.simulate(lambda: step(homes), 4):
        assert found == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(updated, weight)
