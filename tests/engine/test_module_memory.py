"""Tensors of a module that share memory still share it after the module is distributed, or an error is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.engine import unmarked

PAIR = mw.ProcessMesh([0, 1], ["tp"])


class Tied(nn.Module):
    """Two weights on one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight.data = self.a.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Reference(nn.Module):
    """A buffer on the memory of a parameter."""

    w0: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("w0", self.a.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a.weight + 0.5 * self.w0, self.a.bias)


class Attribute(Reference):
    """An attribute that is no buffer, on the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.w0
        self.w0 = self.a.weight.data


class SameObject(nn.Module):
    """An attribute that is the same object as a buffer."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.scale = self.kept

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept.add_(self.a.bias)
        return self.a(x) * self.scale


class Parts(nn.Module):
    """Parameters that are different parts of a flat buffer, and columns of it."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2, 20)
        self.w = nn.Parameter(flat[0, :16].view(4, 4))
        self.left, self.right = nn.Parameter(flat[:, 16:18]), nn.Parameter(flat[:, 18:])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w) + torch.cat([self.left, self.right], 1).sum(0)


class Spectral(nn.Module):
    """The older spectral norm has an attribute on the memory of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


KEPT = [Tied, Reference, Attribute, SameObject, Parts, Spectral]


def cut_weights(name: str, module: nn.Module, mesh: mw.ProcessMesh) -> None:
    for key, p in list(module._parameters.items()):
        if p is not None and p.dim() == 2:
            setattr(module, key, mw.shard_tensor(p, mesh, [mw.Shard(0)]))
    for key, b in list(module._buffers.items()):
        if b is not None and b.dim() == 2:
            setattr(module, key, mw.shard_tensor(b, mesh, [mw.Shard(0)]))


LAYS: dict[str, Callable[[nn.Module], Any]] = {
    "shard_layer": lambda net: mw.shard_layer(net, PAIR),
    "cut": lambda net: mw.shard_layer(net, PAIR, cut_weights),
    "twice": lambda net: mw.shard_layer(mw.shard_layer(net, PAIR), PAIR, cut_weights),
    "parallelize": lambda net: mw.parallelize(net, None, PAIR),
}


def steps(make: Callable[[], nn.Module], lay: Callable[[nn.Module], Any] | None) -> list[Any]:
    torch.manual_seed(0)
    net = make()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    if lay is not None:
        lay(net)
    optimizer, found = torch.optim.SGD(net.parameters(), 0.5), list[Any]()
    for _ in range(3):
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    tensors = {**net.state_dict(), **{k: v for k, v in vars(net).items() if isinstance(v, Tensor)}}
    return [found, {k: mw.unshard_dtensor(v).tolist() for k, v in tensors.items()}]


@pytest.mark.parametrize("lay", LAYS)
@pytest.mark.parametrize("make", KEPT, ids=lambda m: m.__name__)
def test_a_distributed_module_trains_like_one_device(make: Callable[[], nn.Module], lay: str) -> None:
    losses, tensors = steps(make, None)
    for found_losses, found in mw.simulate(lambda: steps(make, LAYS[lay]), 2):
        assert found_losses == pytest.approx(losses, rel=1e-4)
        assert found.keys() == tensors.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-4, atol=1e-5)


REFUSED = ["Tied", "Attribute", "SameObject"]
"""Modules that a static step would write in two places of one memory."""


def test_static_steps_of_tied_weights_are_right_or_refused() -> None:
    refused: list[str] = []
    for make in KEPT:
        losses, _ = steps(make, None)

        def on_rank(make: Any = make, losses: Any = losses) -> None:
            torch.manual_seed(0)
            net = make()
            x, y = torch.randn(6, 4), torch.randn(6, 4)
            mw.shard_layer(net, PAIR)
            optimizer = torch.optim.SGD(net.parameters(), 0.5)
            model = mw.to_static(net, loss=F.mse_loss, optimizer=optimizer).train()
            found = [model(x, y).item() for _ in range(3)]
            assert found == pytest.approx(losses, rel=1e-4), make

        try:
            mw.simulate(on_rank, 2)
        except mw.MeshwrightError:
            refused.append(make.__name__)
    assert refused == REFUSED


def view_of_a_buffer() -> nn.Module:
    net: Any = nn.Linear(4, 4)
    net.register_buffer("base", torch.zeros(2, 4))
    net.row = net.base[0]
    return net


def half_of_a_weight() -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].weight.data = net[0].weight.data[:2]
    return net


def transposed() -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data.t()
    return net


def computed() -> nn.Module:
    net: Any = nn.Linear(4, 4)
    net.alias = net.weight.view(4, 4)
    return net


PARTLY = [view_of_a_buffer, half_of_a_weight, transposed, computed]


@pytest.mark.parametrize("make", PARTLY, ids=lambda m: m.__name__)
def test_shared_memory_that_parts_cannot_share_is_refused(make: Callable[[], nn.Module]) -> None:
    def on_rank() -> None:
        net = make()
        before = [dict(m._parameters) for m in net.modules()]
        for lay in LAYS.values():
            with pytest.raises(mw.errors.SharedMemoryError, match=r"clone|detach"):
                lay(net)
        assert [dict(m._parameters) for m in net.modules()] == before

    mw.simulate(on_rank, 2)


def test_different_layouts_are_refused_and_nothing_is_changed() -> None:
    def on_rank() -> None:
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight.data = net[0].weight.data
        before = [(dict(m._parameters), len(m._forward_pre_hooks)) for m in net.modules()]
        stages = mw.ProcessMesh([0, 1], ["pp"])
        for lay in (
            lambda: mw.parallelize(net, None, PAIR, mw.Parallelism({"0": mw.ColwiseParallel()})),
            lambda: mw.split_pipeline(net, stages),
        ):
            with pytest.raises(mw.errors.SharedMemoryError, match=r"give both the same layout.*one tensor for both"):
                lay()
            assert [(dict(m._parameters), len(m._forward_pre_hooks)) for m in net.modules()] == before
        mw.split_pipeline(nn.Sequential(net), mw.ProcessMesh([0], ["pp"]))
        assert net[0].weight.to_local().data_ptr() == net[1].weight.to_local().data_ptr()

    mw.simulate(on_rank, 2)


def test_zero_and_master_weights_refuse_parameters_on_one_memory() -> None:
    def on_rank() -> None:
        how: dict[str, Any]
        for how in ({"shard_fn": mw.ShardingStage1("tp", least=1)}, {"master_weights": True}, {"offload": True}):
            net = mw.shard_layer(Tied(), PAIR)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            with pytest.raises(mw.errors.SharedMemoryError, match="share memory"):
                mw.shard_optimizer(optimizer, **how)

    mw.simulate(on_rank, 2)


def test_meta_tensors_are_distributed() -> None:
    def on_rank() -> None:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = net[0].weight
        mw.shard_layer(net, PAIR)
        assert net[1].weight is net[0].weight

    mw.simulate(on_rank, 2)


def test_unmarked_modules_keep_shared_memory() -> None:
    losses, _ = steps(Tied, None)

    def on_rank() -> None:
        with unmarked():
            found, _ = steps(Tied, None)
        assert found == pytest.approx(losses, rel=1e-4)

    mw.simulate(on_rank, 2)
