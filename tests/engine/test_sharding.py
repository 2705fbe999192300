"""ZeRO in eager mode: every stage has the numbers of one device, and the memory of its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.layout import MeshError

STEPS, ROWS, WORDS = 3, 12, 50
MESHES = {
    "dp": ([4], ["dp"], "dp"),
    "three": ([3], ["dp"], "dp"),
    "dp × tp": ([2, 2], ["dp", "tp"], "dp"),
    "within a node": ([2, 2], ["node", "dp"], "dp"),
    "both axes": ([2, 2], ["node", "dp"], ("node", "dp")),
}


class Net(nn.Module):
    """Sizes that no mesh divides evenly, a tied weight, a frozen layer, a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 35)
        self.up, self.norm, self.down = nn.Linear(35, 64), nn.LayerNorm(64), nn.Linear(64, 35)
        self.frozen = nn.Linear(35, 35).requires_grad_(False)
        self.head = nn.Linear(35, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + checkpoint(lambda x: self.down(torch.relu(self.up(x))), x, use_reentrant=False)
        x = x + self.down(self.norm(self.up(self.frozen(x))))
        return self.head(x)


def stage(number: int, axes: Any, model: nn.Module) -> Any:
    if number == 1:
        return mw.ShardingStage1(axes, least=20)
    kind = {2: mw.ShardingStage2, 3: mw.ShardingStage3}
    return kind[number](axes, model, least=20) if number else None


def train(number: int | None, mesh: Any, axes: Any, make: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    model = Net()
    if mesh is not None:

        def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
            if name == "up" and "tp" in mesh.dim_names:
                layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Replicate(), mw.Shard(0)])

        mw.shard_layer(model, mesh, cut)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    if mesh is not None:
        mw.shard_optimizer(optimizer, stage(number or 0, axes, model))
    placements = [mw.Shard(0) if a in ("dp", "node") else mw.Replicate() for a in mesh.dim_names] if mesh else []
    losses: list[float] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for _ in range(2):
            pair = [torch.randint(0, WORDS, (ROWS,), generator=generator) for _ in range(2)]
            x, y = [mw.shard_tensor(t, mesh, placements) for t in pair] if mesh else pair
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    where = {key: getattr(x, "placements", None) for key, x in optimizer.state[model.up.weight].items()}
    return [losses, [mw.unshard_dtensor(p.detach()) for p in model.parameters()], where]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numbers_are_those_of_one_device(name: str, number: int, optimizer: str) -> None:
    sizes, names, axes = MESHES[name]
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes).numpy()
    make = OPTIMIZERS[optimizer]
    expected = train(None, None, None, make)
    for found in mw.simulate(lambda: train(number, mw.ProcessMesh(ranks, names), axes, make), ranks.size):
        torch.testing.assert_close(found[:2], expected[:2], rtol=2e-5, atol=2e-6)


def test_states_are_sharded() -> None:
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    for number in (1, 2, 3):
        for *_, where in mw.simulate(lambda n=number: train(n, mesh, "dp", OPTIMIZERS["AdamW"]), 2):
            assert where["exp_avg"] == where["exp_avg_sq"] == (mw.Shard(0),)


@pytest.mark.parametrize(("number", "saved"), [(2, 64 * 64), (3, 0)])
def test_stage_3_saves_no_gathered_weight_for_the_backward_pass(number: int, saved: int) -> None:
    """Stage 3 saves no gathered weight."""

    def go() -> int:
        model = nn.Linear(64, 64, bias=False)
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        mw.shard_layer(model, mesh)
        mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage(number, "dp", model))
        x = mw.shard_tensor(torch.ones(4, 64), mesh, [mw.Shard(0)]).requires_grad_()
        out = model(x)
        assert model.weight.placements == (mw.Shard(0),)
        found = sum(t.numel() for t in saved_by(out.to_local().grad_fn) if tuple(t.shape) == (64, 64))
        out.sum().backward()
        assert model.weight.grad.placements == (mw.Shard(0),)
        return found

    assert mw.simulate(go, 2) == [saved] * 2


class Views(nn.Module):
    """A model that saves other views of a parameter's memory: complex, conjugated, or with the other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(20, 2, generator=torch.Generator().manual_seed(0)))
        self.waves = nn.Parameter(torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.pairs)
        return (x / z * self.waves.conj()).abs().mean() + (x * self.waves.conj().imag).square().mean()


def test_saved_tensors_may_be_other_views_of_memory() -> None:
    mesh, x = mw.ProcessMesh([0, 1], ["dp"]), torch.randn(6, 20, generator=torch.Generator().manual_seed(2))

    def gradients(laid: bool) -> list[Tensor]:
        model, batch = Views(), x
        if laid:
            mw.shard_layer(model, mesh)
            mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), stage(3, "dp", model))
            batch = mw.shard_tensor(x, mesh, [mw.Shard(0)])
        model(batch).backward()
        return [mw.unshard_dtensor(p.grad) for p in model.parameters()]

    for found in mw.simulate(lambda: gradients(True), 2):
        torch.testing.assert_close(found, gradients(False))


def saved_by(node: Any) -> list[Tensor]:
    """Return the tensors that a node and its inputs hold unmodified."""
    found: list[Tensor] = []
    while node is not None:
        raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
        found += [r.data for r in raw if isinstance(getattr(r, "data", None), Tensor)]
        node = node.next_functions[0][0] if node.next_functions else None
    return found


def test_a_static_program_continues_from_any_stage() -> None:
    def go(number: int) -> list[float]:
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        mw.shard_layer(model, mesh)
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), stage(number, "dp", model))
        x, y = (mw.shard_tensor(torch.ones(4, 8) * n, mesh, [mw.Shard(0)]) for n in (1, 2))
        losses: list[float] = []
        for _ in range(2):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        static = mw.to_static(model, None, nn.functional.mse_loss, optimizer)
        return losses + [static(x, y).item() for _ in range(2)]

    expected = mw.simulate(go, 2, 0)[0]
    for number in (1, 2, 3):
        assert mw.simulate(go, 2, number)[0] == pytest.approx(expected, rel=1e-5)


def test_parameters_that_cannot_be_sharded_are_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MeshError, match="on no mesh"):
        mw.shard_optimizer(optimizer, mw.ShardingStage1("dp"))

    def other_axis() -> None:
        laid = mw.shard_layer(model, mw.ProcessMesh([0, 1], ["tp"]))
        mw.shard_optimizer(torch.optim.SGD(laid.parameters(), lr=0.1), mw.ShardingStage1("dp"))

    with pytest.raises(MeshError, match="no mesh axis 'dp'"):
        mw.simulate(other_axis, 2)
