"""Values that one stage makes and later ones read, in models that were not written for a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.tensor import MemoryAccessError, MixedMeshError, OperationError

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(self.norm(x)))


class Net(nn.Module):
    """A stack of layers between an entry and a head, which are the first and the last ones of a pipeline."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)


class SkipConnections(Net):
    """A U-Net: the second half adds the values of the first half in reverse order."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, skips = self.entry(x), list[Tensor]()
        for layer in self.layers[:2]:
            x = layer(x)
            skips.append(x)
        for layer in self.layers[2:]:
            x = layer(torch.cat([x, skips.pop()], 1)[:, : x.shape[1]] + x)
        return F.mse_loss(self.head(x), y)


class EarlyLosses(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, aux = self.entry(x), list[Tensor]()
        for layer in self.layers:
            x = layer(x)
            aux.append(x.square().mean())
        return F.mse_loss(self.head(x), y) + 0.1 * sum(aux)


class Box:
    """An object that no library inspects."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxed(Layer):
    def forward(self, x: Tensor, box: Box) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - two inputs
        return super().forward(x) * box.x


class InAnObject(Net):
    """A model that passes a mask and a value with a gradient to its layers in objects."""

    layer = Boxed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = Box((x.mean(-1, keepdim=True) > 0).float() + y.std())
        x = self.entry(x)
        gate = Box(x.mean(1, keepdim=True).sigmoid())
        for n, layer in enumerate(self.layers):
            x = layer(x, gate if n % 2 else mask)
        return F.mse_loss(self.head(x), y)


@dataclass
class State:
    x: Tensor
    first: Tensor


class OfState(Layer):
    def forward(self, state: State) -> State:  # pyright: ignore[reportIncompatibleMethodOverride] - a state
        return State(super().forward(state.x) + state.first, state.first)


class InADataclass(Net):
    layer = OfState

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = State(self.entry(x), x.sum(-1, keepdim=True))
        for layer in self.layers:
            state = layer(state)
        return F.mse_loss(self.head(state.x), y)


class Collecting(Layer):
    def forward(self, x: Tensor, found: list[Tensor], notes: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - more
        x = super().forward(x)
        found.append(x.square().mean())
        notes["last"] = x
        return x


class CollectedInLists(Net):
    """Layers append to a list and write into a dict of their caller."""

    layer = Collecting

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        found, notes = [x.mean()], {"first": x}
        for layer in self.layers:
            x = layer(x, found, notes)
        return F.mse_loss(self.head(x + notes["last"] + notes["first"]), y) + 0.1 * torch.stack(found).sum()


class RootParameters(Net):
    """Parameters and a buffer of the outermost module, which all stages read and the last one updates."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(4, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x) - self.mean
        for n, layer in enumerate(self.layers):
            x = layer(x * self.gains[n])
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return F.mse_loss(self.head(x), y)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(3, WIDTH), Layer()) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (tower(t).mean(1) for tower, t in zip(self.towers, (x, y), strict=True))
        return (a @ b.t()).logsumexp(1).mean()


class BackAndForth(Net):
    """Layers of later stages are used before layers of earlier ones."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        a = first(self.entry(x))
        b = fourth(a)
        c = second(a + b)
        return F.mse_loss(self.head(fourth(c) + second(a) + third(b)), y) + c.square().mean()


class DroppedTable(Net):
    """A table of positions that depends on no parameter, with dropout, which the layers of all stages read."""

    layer = Boxed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        table = torch.linspace(0, 1, WIDTH).cos().expand(x.shape[1], WIDTH)
        box = Box(F.dropout(table, 0.5) + 0.5)
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x, box)
        return F.mse_loss(self.head(x), y)


class SampledValues(Net):
    """Random numbers of the shape of a value of the first stage, which the second stage reads without a gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        mean = second(first(self.entry(x)))
        noise = torch.randn_like(mean)
        x = third(mean + 1)
        return F.mse_loss(self.head(fourth(x + noise)), y) + mean.square().mean()


MODELS = [
    SkipConnections, EarlyLosses, InAnObject, InADataclass, CollectedInLists, RootParameters, TwoTowers, BackAndForth,
    DroppedTable, SampledValues,
]  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 2, 3, generator=g), torch.randn(4, 2, 3, generator=g)


def trained(kind: Callable[[], nn.Module], static: bool, mesh: Any = None, **options: Any) -> list[Any]:
    """Return the losses of two steps, and the parameters and buffers after them."""
    torch.manual_seed(0)
    model = kind()
    if mesh is not None:
        mw.parallelize(model, None, mw.ProcessMesh(*mesh), mw.Parallelism())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    strategy = mw.Strategy.of(pipeline={"enable": True, **options})
    run = mw.to_static(model, None, None, optimizer, strategy) if static and mesh is not None else None
    losses: list[float] = []
    for step in range(2):
        if run is not None:
            losses.append(run(*batch(step)).item())
            continue
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [torch.tensor(losses), *(mw.unshard_dtensor(x.detach()) for x in model.state_dict().values())]


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("kind", MODELS)
def test_numbers_are_those_of_one_device(kind: Callable[[], nn.Module], static: bool) -> None:
    for found in mw.simulate(lambda: trained(kind, static, ([0, 1], ["pp"])), 2):
        torch.testing.assert_close(found, trained(kind, False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_rows_stay_on_their_replicas(static: bool) -> None:
    for found in mw.simulate(lambda: trained(EarlyLosses, static, ([[0, 1], [2, 3]], ["dp", "pp"])), 4):
        torch.testing.assert_close(found, trained(EarlyLosses, False), rtol=1e-5, atol=1e-6)


class MomentumEncoder(Net):
    """A layer of the last stage follows one of the first stage, before it is used."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        leader, *_, follower = self.layers
        with torch.no_grad():
            for p, q in zip(leader.parameters(), follower.parameters(), strict=True):
                q.lerp_(p, 0.5)
        return F.mse_loss(self.head(follower(leader(self.entry(x)))), y)


def test_a_parameter_is_written_on_its_own_stage() -> None:
    """A schedule by name shows it: a detour over the first stage would be a chunk more."""
    for found in mw.simulate(lambda: trained(MomentumEncoder, True, ([0, 1], ["pp"]), schedule_mode="1F1B"), 2):
        torch.testing.assert_close(found, trained(MomentumEncoder, False), rtol=1e-5, atol=1e-6)


class AddedTwice(Net):
    """A parameter of the shape of a microbatch is added twice: one sum is both of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0, 1, 6).reshape(1, 2, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        once = x + self.table
        twice = once + self.table
        x = self.entry(twice.tanh()) + self.entry(twice.sigmoid())
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


def test_a_gradient_that_is_added_to_itself_counts_twice() -> None:
    for found in mw.simulate(lambda: trained(AddedTwice, True, ([0, 1], ["pp"]), accumulate_steps=4), 2):
        torch.testing.assert_close(found, trained(AddedTwice, False), rtol=1e-5, atol=1e-6)


class Routed(Layer):
    """A model with two experts and rows chosen for each: only the stage's ranks know their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = super().forward(x).flatten(0, 1)
        choice, out = (flat.sum(-1) > 0).long(), torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == n)
            out.index_add_(0, rows, expert(flat[rows]))
        count = (choice == 1).sum() + 1
        return x + (out + flat[: int(count)].mean(0)).tanh().view_as(x)


class Experts(Net):
    layer = Routed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


def test_sizes_that_depend_on_values_are_sent_to_other_stages() -> None:
    for found in mw.simulate(lambda: trained(Experts, False, ([0, 1], ["pp"])), 2):
        torch.testing.assert_close(found, trained(Experts, False), rtol=1e-5, atol=1e-6)


class Lengthened(nn.Module):
    """Rows are repeated or packed, as plain numbers of each batch say, and are sent to the next stage."""

    def __init__(self, is_packed: bool) -> None:
        super().__init__()
        self.is_packed = is_packed
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_packed:
            x = nn.utils.rnn.pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False).data
        else:
            x = torch.repeat_interleave(x[:, 0], counts, 0)
        return self.last(x).square().sum()


@pytest.mark.parametrize("is_packed", [False, True])
def test_plain_values_may_decide_other_sizes_in_each_call(is_packed: bool) -> None:
    def gradients(mesh: mw.ProcessMesh | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Lengthened(is_packed)
        if mesh is not None:
            mw.split_pipeline(model, mesh, at=["last"])
        for counts in ([1, 3], [2, 3], [1, 1]):
            model(torch.ones(2, 3, WIDTH), torch.tensor(counts)).backward()
        return [mw.unshard_dtensor(p.grad) for p in model.parameters()]

    for found in mw.simulate(lambda: gradients(mw.ProcessMesh([0, 1], ["pp"])), 2):
        torch.testing.assert_close(found, gradients(None), rtol=1e-5, atol=1e-6)


class OneMask(Net):
    """All layers of both stages multiply by a value that has a gradient."""

    layer = Boxed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        box = Box(x.mean(1, keepdim=True))
        for layer in self.layers:
            x = layer(x, box)
        return F.mse_loss(self.head(x), y)


def test_a_value_is_sent_to_a_stage_once() -> None:
    """The chain's value and the box are sent once each, for any number of readers; so are their gradients."""

    def go() -> tuple[int, int]:
        model = mw.split_pipeline(OneMask(), mw.ProcessMesh([0, 1], ["pp"]), at=["layers.2"])
        seen = current_communicator().seen
        before = seen.calls.get("exchange", 0)
        loss = model(*batch(0))
        forward = seen.calls["exchange"] - before
        loss.backward()
        return forward, seen.calls["exchange"] - before - forward

    assert mw.simulate(go, 2) == [(2, 2), (2, 2)]


class PlainSums(Net):
    """A plain tensor collects a term of each layer, and is read by the layers and the loss of the last stage."""

    layer = Boxed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[:2])
        x = self.entry(x)
        for layer in self.layers[:3]:
            x = layer(x, Box(torch.ones(1)))
            total += x.square().mean(-1)
        x = self.layers[3](x, Box(total.unsqueeze(-1)))
        return (self.head(x) - y).square().mean() + (x.mean(-1) + total).sigmoid().mean()


class PlainSumsAsInputs(Net):
    """A layer of the last stage gets a plain tensor, to which the first stage wrote, as an argument."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:2], WIDTH)
        for layer in self.layers[:2]:
            total += layer(self.entry(x))
        return F.mse_loss(self.head(self.layers[3](total)), y)


@pytest.mark.parametrize("kind", [PlainSums, PlainSumsAsInputs])
def test_a_plain_tensor_that_collects_terms_passes_gradients_on(kind: Callable[[], nn.Module]) -> None:
    for found in mw.simulate(lambda: trained(kind, False, ([0, 1], ["pp"])), 2):
        torch.testing.assert_close(found, trained(kind, False), rtol=1e-5, atol=1e-6)


def gradients_of_plain(in_stages: bool) -> list[Tensor]:
    """Return the gradients of a plain input and of a plain parameter of the loss, after calls with and without them."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    x, scale = torch.randn(4, 3), nn.Parameter(torch.rand(3))
    if in_stages:
        mw.split_pipeline(net, mw.ProcessMesh([0, 1], ["pp"]))
    for needs_gradient in (False, True):
        loss = (net(x.requires_grad_(needs_gradient)) * scale.requires_grad_(needs_gradient)).square().mean()
    loss.backward()
    assert x.grad is not None
    assert scale.grad is not None
    return [x.grad, scale.grad]


def test_plain_tensors_get_their_gradients_on_all_ranks() -> None:
    for found in mw.simulate(lambda: gradients_of_plain(True), 2):
        torch.testing.assert_close(found, gradients_of_plain(False), rtol=1e-5, atol=1e-6)


def test_second_derivatives_through_stages_are_refused() -> None:
    def go() -> None:
        net = mw.split_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), mw.ProcessMesh([0, 1], ["pp"]))
        x = torch.ones(2, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), x)
        assert slope.shape == x.shape
        with pytest.raises(OperationError, match="to_static"):
            torch.autograd.grad(net(x).sum(), x, create_graph=True)

    mw.simulate(go, 2)


def test_meshes_that_are_no_stages_are_refused() -> None:
    def go() -> None:
        one, other = (mw.shard_tensor(torch.ones(2), mw.ProcessMesh([n], ["x"])) for n in range(2))
        with pytest.raises(MixedMeshError):
            torch.add(one, other)

    mw.simulate(go, 2)


Assigned = Callable[[nn.Parameter, nn.Parameter], list[Any]]


def _data_of_a_temporary(early: Any, late: Any) -> list[Any]:
    early.data, late.data = (late * 2).detach().clone(), (early + 1).detach().clone()
    (late * late).sum().backward()
    return [early.tolist(), late.tolist(), late.grad.tolist()]


def _gradient_of_a_temporary(early: Any, late: Any) -> list[Any]:
    early.grad, late.grad = late.detach() * 2, early.detach() * 3
    (late * 3).sum().backward()
    return [early.grad.tolist(), late.grad.tolist()]


def _data_that_is_kept(early: Any, late: Any) -> list[Any]:
    early.data = kept = late.detach().clone()
    kept.add_(1)
    return early.tolist()


def _data_that_is_a_view(early: Any, late: Any) -> list[Any]:
    flat = torch.cat([late, late]).detach()
    early.data = flat[:3]
    flat.add_(1)
    return early.tolist()


def _gradient_that_is_kept(early: Any, late: Any) -> list[Any]:
    early.grad = kept = late.detach().clone()
    kept.add_(1)
    return early.grad.tolist()


def _gradient_that_is_a_view(early: Any, late: Any) -> list[Any]:
    flat = torch.cat([late, late]).detach()
    early.grad = flat[:3]
    flat.add_(1)
    return early.grad.tolist()


@pytest.mark.parametrize("assign", [_data_of_a_temporary, _gradient_of_a_temporary], ids=lambda f: f.__name__)
def test_temporaries_of_another_stage_are_assigned_by_value(assign: Assigned) -> None:
    torch.testing.assert_close(mw.simulate(lambda: assign(*_biases(True)), 2), [assign(*_biases(False))] * 2)


@pytest.mark.parametrize(
    "assign",
    [_data_that_is_kept, _data_that_is_a_view, _gradient_that_is_kept, _gradient_that_is_a_view],
    ids=lambda f: f.__name__,
)
def test_memory_of_another_stage_is_not_shared_silently(assign: Assigned) -> None:
    with pytest.raises(MemoryAccessError, match="would share memory"):
        mw.simulate(lambda: assign(*_biases(True)), 2)


def _biases(in_stages: bool) -> list[nn.Parameter]:
    """Return a parameter of the first stage and one of the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if in_stages:
        mw.split_pipeline(net, mw.ProcessMesh([0, 1], ["pp"]))
    return [layer.bias for layer in net]  # pyright: ignore[reportReturnType] - Sequential's items are modules
