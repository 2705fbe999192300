"""`p.data = a` shares memory as on one device, in every pair of layouts; a temporary gives its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

N = 5
LAYOUTS: dict[str, list[Any] | None] = {
    "plain": None,
    "Replicate": [mw.Replicate()],
    "Shard(0)": [mw.Shard(0)],
    "Shard(1)": [mw.Shard(1)],
    "Partial": [mw.Partial()],
}
Lay = Callable[[Tensor], Tensor]


def numbers(*shape: int) -> Tensor:
    return (torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * 7) % 5 - 2.25


def whole(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N, N))
    p.data = a
    return a


def data(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N, N))
    p.data = a.data
    return a


def rows(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N + 2, N))
    p.data = a.data[2:]
    return a


def columns(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N, N + 3))
    p.data = a[:, 1 : N + 1]
    return a


def turned(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N, N))
    p.data = a.t()
    return a


def from_flat(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N * N + 4, 1))
    p.data = a[3 : 3 + p.numel(), 0].view_as(p)
    return a


def own(p: Tensor, lay: Lay) -> Tensor:
    """Set the tensor's data to the transposed memory of the tensor itself."""
    a = p.data
    p.data = p.data.t()
    return a


def swapped(p: Tensor, lay: Lay) -> Tensor:
    a = lay(numbers(N, N)).requires_grad_()
    kept = a.data
    a.data = p.data
    p.data = kept
    with torch.no_grad():
        a.mul_(2)
    return kept


def by_another(p: Tensor, lay: Lay) -> Tensor:
    a, other = lay(numbers(N, N)), p.detach().clone()
    other.data = a
    p.data = other
    with torch.no_grad():
        other[1].add_(1)
    return a


def twice(p: Tensor, lay: Lay) -> Tensor:
    """Set data twice; views of the first memory stay there."""
    first, a = lay(numbers(N, N)), lay(numbers(N, N) + 1)
    p.data = first
    row = p.detach()[1]
    p.data = a
    row.fill_(9)
    return a if first[1, 0] == 9 else first


WAYS = [whole, data, rows, columns, turned, from_flat, own, swapped, by_another, twice]


def in_turn(p: Tensor, a: Tensor) -> list[Tensor]:
    """Write through either side, and read through both after each write."""
    found: list[Tensor] = []

    def read() -> None:
        found.extend(plain(t) for t in (p, a))

    with torch.no_grad():
        view = p[1:4]
        for write in (
            lambda: a.mul_(2),
            lambda: p.add_(1),
            lambda: a.data[2:].fill_(3),
            lambda: p.data[:, 1].mul_(2),
            lambda: view.sub_(a.sum()),
            lambda: a.t()[0].add_(1),
            lambda: p.detach().copy_(p.t() * 1),
        ):
            write()
            read()
    return found


def training(p: Tensor, a: Tensor) -> list[Tensor]:
    """Write to the shared memory between forward and backward passes, and by optimizers."""
    found: list[Tensor] = []
    optimizers = [torch.optim.SGD([p], 0.1, momentum=0.9), torch.optim.Adam([p], 0.1, foreach=True)]
    for optimizer in optimizers:
        loss = (p @ p.t()).sin().sum() + (p**2).sum()
        a.data.mul_(0.5)
        loss.backward()
        assert p.grad is not None
        found.append(plain(p.grad))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            a.add_(1)
        found += [plain(p), plain(a)]
    p.data.clamp_(-1, 1)
    return [*found, plain(a), plain(p * 2)]


def plain(x: Tensor) -> Tensor:
    return (mw.unshard_dtensor(x.detach()) if isinstance(x, mw.DistTensor) else x.detach()).clone()


def lay_on(ranks: int, layout: str) -> Lay:
    placements = LAYOUTS[layout]
    if placements is None:
        return lambda x: x
    mesh = mw.ProcessMesh(range(ranks), ["x"])
    return lambda x: mw.shard_tensor(x, mesh, placements)


PAIRS = [(of_p, of_a) for of_p in list(LAYOUTS)[1:] for of_a in LAYOUTS]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("program", [in_turn, training], ids=lambda p: p.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda p: p.__name__)
def test_assigned_memory_is_shared_in_every_pair_of_layouts(way: Any, program: Any, ranks: int) -> None:
    p = numbers(N, N).add(1).requires_grad_()
    wanted = program(p, way(p, lambda x: x))
    for of_p, of_a in PAIRS[ranks - 1 :: 4]:  # another quarter on each number of ranks

        def on_rank(of_p: str = of_p, of_a: str = of_a) -> list[Tensor]:
            p = lay_on(ranks, of_p)(numbers(N, N).add(1)).requires_grad_()
            return program(p, way(p, lay_on(ranks, of_a)))

        for found in mw.simulate(on_rank, ranks):
            torch.testing.assert_close(found, wanted, msg=lambda m, of=(of_p, of_a): f"{of}: {m}")


TEMPORARIES: dict[str, Callable[[Tensor], Any]] = {
    "a new tensor": lambda p: numbers(N, N),
    "a turned new tensor": lambda p: numbers(N, N).t(),
    "the scaled parameter": lambda p: p.data * 0.9,
    "a parameter": lambda p: nn.Parameter(numbers(N, N)),
    "a new replicated tensor": lambda p: lay_on(2, "Replicate")(numbers(N, N)),
    "a new sharded tensor": lambda p: lay_on(2, "Shard(1)")(numbers(N, N)),
}


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_a_temporary_gives_only_its_values(layout: str) -> None:
    def on_rank() -> None:
        for make in TEMPORARIES.values():
            p = lay_on(2, layout)(numbers(N, N).add(1)).requires_grad_()
            spec, value = p.spec, plain(make(p))
            p.data = make(p)
            torch.testing.assert_close(plain(p), value)
            setattr(p, "data", make(p))  # noqa: B010 - a call, not a statement
            assert type(p) is mw.DistTensor
            assert p.spec.layout == spec.layout

    mw.simulate(on_rank, 2)


def test_the_view_ends_when_nothing_else_uses_the_memory() -> None:
    def on_rank() -> None:
        p, a = lay_on(2, "Shard(0)")(numbers(N, N)).requires_grad_(), numbers(N, N)
        p.data = a
        row = p.detach()[1]
        p.data.add_(1)
        assert type(p) is not mw.DistTensor
        torch.testing.assert_close(a, numbers(N, N) + 1)
        del a
        p.data.add_(1)
        assert type(p) is mw.DistTensor
        row.zero_()
        assert p[1].sum() == 0

    mw.simulate(on_rank, 2)


def test_memory_that_some_ranks_do_not_hold_is_not_shared() -> None:
    def on_rank() -> None:
        p, a = mw.shard_tensor(numbers(N, N), mw.ProcessMesh([0], ["x"]), [mw.Replicate()]), numbers(N, N)
        q = mw.shard_tensor(numbers(N, N), mw.ProcessMesh([0, 1], ["x"]), [mw.Replicate()])
        with pytest.raises(mw.MemoryAccessError, match=r"y\.clone\(\)"):
            q.data = p
        q.data = p.clone()
        del a

    mw.simulate(on_rank, 2)


def test_a_recorded_program_refuses_a_parameter_that_shares_other_parts() -> None:
    def on_rank() -> None:
        layer: Any = nn.Linear(N, N, bias=False)
        layer.weight = lay_on(2, "Shard(0)")(layer.weight)
        kept = numbers(N, N)
        layer.weight.data = kept
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        model = mw.to_static(layer, loss=nn.functional.mse_loss, optimizer=optimizer).train()
        with pytest.raises(mw.StaticError, match="weight, which shares the memory"):
            model(numbers(2, N), numbers(2, N))
        del kept
        model(numbers(2, N), numbers(2, N))

    mw.simulate(on_rank, 2)


class _Upper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parametrized_weight_takes_a_plain_tensor(layout: str) -> None:
    def weights(lay: Lay) -> list[Tensor]:
        layer: Any = nn.Linear(N, N, bias=False)
        layer.weight = nn.Parameter(lay(numbers(N, N)))
        nn.utils.parametrize.register_parametrization(layer, "weight", _Upper())
        layer.weight = numbers(N, N) + 1
        layer(numbers(2, N)).square().sum().backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
        return [plain(layer.weight), plain(layer.parametrizations.weight.original)]

    wanted = weights(lambda x: x)
    for found in mw.simulate(lambda: weights(lay_on(2, layout)), 2):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_one_no_grad_block_can_be_read_after_it(layout: str) -> None:
    def values(lay: Lay) -> list[Any]:
        w = lay(torch.ones(3, 4)).requires_grad_()
        with torch.no_grad():
            flat, diagonal = w.view(-1), w.diagonal()
            w.reshape(2, 6)[1] += 1
        (w**2).sum().backward()
        return [w.tolist(), flat.tolist(), diagonal.tolist(), plain(w.grad if w.grad is not None else w).tolist()]

    assert mw.simulate(lambda: values(lay_on(2, layout)), 2) == [values(lambda x: x)] * 2


SHARING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "set_": lambda x, y: x.set_(y),
    "data taken": lambda x, y: x.data,
    "data put": lambda x, y: setattr(x, "data", y),
    "detached": lambda x, y: x.detach(),
}


@pytest.mark.parametrize("share", SHARING)
def test_a_tensor_that_shares_memory_can_be_swapped(share: str) -> None:
    def program(mark: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x, y, z = (mark(torch.full((4, 3), float(n))) for n in range(3))
        other = SHARING[share](x, y)
        torch.utils.swap_tensors(x, z)
        y.add_(1)
        x[1:].mul_(3)
        z.sub_(4)
        return [x, y, z] if other is None else [x, y, z, other]

    want = program(lambda t: t)
    mesh = mw.ProcessMesh(range(2), ["x"])
    for place in (mw.Shard(0), mw.Shard(1)):

        def on_rank(place: Any = place) -> list[Tensor]:
            return [mw.unshard_dtensor(t) for t in program(lambda t: mw.shard_tensor(t, mesh, [place]))]

        for found in mw.simulate(on_rank, 2):
            torch.testing.assert_close(found, want)
