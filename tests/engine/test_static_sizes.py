"""Batches of changing sizes: recorded again a few times, then never, with the numbers of eager mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StaticError

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
SIZES = [(8, 6), (8, 6), (4, 6), (12, 10), (6, 5), (4, 4), (16, 9)]


class Model(nn.Module):
    """A model that reads sizes in Python: positions by `arange`, a flattening of batch and sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x_bsd: Tensor, labels_bs: Tensor) -> Tensor:
        b, s, _ = x_bsd.shape
        positions_s = torch.arange(s) / s
        return F.cross_entropy(self.layers(x_bsd + positions_s[:, None]).view(b * s, -1), labels_bs.view(-1))


def losses(static: bool, sizes: list[tuple[int, int]], most: int = 16) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = Model()
    first = model.layers[0]
    first.weight = mw.shard_tensor(first.weight, MESH, [mw.Replicate(), mw.Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dist_model = mw.to_static(model, None, None, optimizer, mw.Strategy(max_programs=most))
    found: list[float] = []
    for b, s in sizes:
        torch.manual_seed(b * s)
        batch = [mw.shard_tensor(v, MESH, [mw.Shard(0)]) for v in (torch.randn(b, s, 8), torch.randint(0, 4, (b, s)))]
        if static:
            found.append(dist_model(*batch).item())
            continue
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, dist_model.recordings


def test_changing_sizes_are_recorded_three_times() -> None:
    eager = mw.simulate(lambda: losses(False, SIZES), 4)[0]
    static = mw.simulate(lambda: losses(True, SIZES), 4)[0]
    assert static[0] == eager[0]
    assert static[1] == 3  # the first sizes; another batch; another length


def test_the_number_of_programs_is_bounded() -> None:
    with pytest.raises(StaticError, match="max_programs"):
        mw.simulate(lambda: losses(True, SIZES, most=1), 4)


def test_a_compared_size_is_recorded_for_both_outcomes() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x_sd: Tensor) -> Tensor:
            return self.layer(x_sd).sum() * (2 if x_sd.shape[0] > 10 else 1)

    torch.manual_seed(0)
    model = Long()
    dist_model = mw.to_static(model, None, lambda out, labels: out + 0 * labels)
    dist_model.eval()

    def run() -> int:
        for n in (4, 6, 8, 12, 14, 16, 5, 9, 20):
            x = torch.randn(n, 4)
            assert dist_model(x, torch.zeros(())).item() == pytest.approx(model(x).item(), rel=1e-5)
        return dist_model.recordings

    assert mw.simulate(run, 1) == [3]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(4.0))


class Reshaped(Scaled):
    """A reshape to sizes read in Python, which may be the tensor's own sizes."""

    def forward(self, x_nd: Tensor) -> Tensor:
        return x_nd.reshape(*x_nd.shape[:-1], x_nd.shape[-1]) * self.scale


class Chosen(Scaled):
    """Rows by indices into the whole batch, of which a rank holds a part."""

    def forward(self, x_nd: Tensor) -> Tensor:
        return x_nd[torch.tensor([3, 0, 1])] * self.scale


@pytest.mark.parametrize("kind", [Reshaped, Chosen])
def test_changing_sizes_of_a_sharded_batch(kind: type[Scaled]) -> None:
    def run() -> int:
        dist_model = mw.to_static(mw.shard_layer(kind(), MESH)).eval()
        for n in (8, 16, 24, 12):
            x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
            found = mw.unshard_dtensor(dist_model(mw.shard_tensor(x, MESH, [mw.Shard(0), mw.Shard(0)])))
            torch.testing.assert_close(found, kind()(x))
        return dist_model.recordings

    assert mw.simulate(run, 4) == [2] * 4


class Mean(Scaled):
    """A model whose output depends on every size."""

    def forward(self, x_nd: Tensor) -> Tensor:
        return (x_nd * self.scale.sum()).sum() / x_nd.numel()


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ([(8, 4), (5, 4), (7, 4), (3, 4), (12, 4), (16, 4)], 4),  # 5 rows are no multiple of the ranks
        ([(8, 4), (1, 4), (5, 4), (6, 4)], 1),  # a size of one is not symbolic
        ([(8, 8), (6, 6), (6, 10), (10, 6), (4, 4)], 4),  # equal numbers of rows and columns in one batch
    ],
)
def test_a_program_runs_only_for_its_recorded_sizes(sizes: list[tuple[int, int]], ranks: int) -> None:
    def run() -> None:
        mesh = mw.ProcessMesh(list(range(ranks)), ["dp"])
        dist_model = mw.to_static(mw.shard_layer(Mean(), mesh)).eval()
        for shape in sizes:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
            found = mw.unshard_dtensor(dist_model(mw.shard_tensor(x, mesh, [mw.Shard(0)])))
            torch.testing.assert_close(found, Mean()(x))

    mw.simulate(run, ranks)
