"""Microbatches in eager mode: the numbers of one device in the order of a table, and refused schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.pipeline import ScheduleError, StageError, one_f_one_b
from tests.pipeline.oracle import STEPS, Chain, alone, batch, compare, laid, loss_of

TABLES = ["GPipe", "1F1B", "Eager 1F1B", "ZB-H1", "ZB-2p"]


def stepped(chunks: int, schedule: str, microbatches: int, rows: int, ranks_per_stage: int = 1) -> list[Any]:
    """Return the losses of this rank, and its parameters after the last step."""
    torch.manual_seed(1)
    model = laid(Chain(chunks, tied=True), range(chunks), ranks_per_stage)
    ranks = torch.arange(chunks * ranks_per_stage).reshape(chunks, ranks_per_stage).numpy()
    mesh = mw.ProcessMesh(ranks, ["pp", "dp"])

    def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(out, mw.reshard(labels, model.homes[-1], [mw.Replicate()]))

    for layer, home in zip(model.blocks, model.homes, strict=True):
        mw.shard_layer(layer, home)
    mw.shard_layer(model.norm, model.homes[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = mw.microbatched(model, loss, mesh, microbatches, schedule)
    losses: list[float] = []
    for step in range(STEPS):
        losses.append(run(*batch(step, rows)).item())
        optimizer.step()
        optimizer.zero_grad()
    return [losses, {name: mw.unshard_dtensor(x.detach()) for name, x in model.state_dict().items()}]


@pytest.mark.parametrize("schedule", TABLES)
@pytest.mark.parametrize(("chunks", "microbatches"), [(2, 4), (4, 4), (3, 2)])
def test_numbers_are_those_of_one_device(schedule: str, chunks: int, microbatches: int) -> None:
    if schedule == "ZB-2p" and microbatches < chunks:
        pytest.skip("it wants as many microbatches as stages")
    for found in mw.simulate(lambda: stepped(chunks, schedule, microbatches, 2 * microbatches), chunks):
        compare(found, alone(chunks, microbatches, 2 * microbatches, tied=True))


def test_stages_of_several_ranks_and_a_table_as_text() -> None:
    for found in mw.simulate(lambda: stepped(2, str(one_f_one_b(2, 4)), 4, 8, ranks_per_stage=2), 4):
        compare(found, alone(2, 4, 8, tied=True))


def test_a_rank_holds_the_activations_of_the_table() -> None:
    """Of six microbatches the first of two ranks has two in flight, and GPipe has all."""

    def most(schedule: str) -> int:
        under_way, most = [0], [0]

        def count(out: torch.Tensor) -> None:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            out.register_hook(lambda _: under_way.__setitem__(0, under_way[0] - 1))

        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        mesh = mw.ProcessMesh([0, 1], ["pp"])
        mw.split_pipeline(net, mesh)
        net[0].register_forward_hook(lambda _, inputs, out: count(out))
        mw.microbatched(net, lambda out, y: out.mean(), mesh, 6, schedule)(torch.ones(6, 4), torch.ones(6))
        return most[0]

    assert mw.simulate(lambda: most("1F1B"), 2)[0] == 2
    assert mw.simulate(lambda: most("GPipe"), 2)[0] == 6


def test_microbatches_of_many_sizes() -> None:
    sizes = [(2, 4), (3, 5), (1, 7)]

    def gradients(homes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        batches = [(torch.randn(*size, 4, generator=torch.Generator().manual_seed(n)),) for n, size in enumerate(sizes)]
        if homes:
            mesh = mw.ProcessMesh([0, 1], ["pp"])
            mw.split_pipeline(net, mesh)
            loss = mw.microbatched(Mean(net), None, mesh, 3).accumulate(batches)
        else:
            loss = sum(Mean(net)(*each) / 3 for each in batches)
            loss.backward()
        return [mw.unshard_dtensor(loss.detach()), *(mw.unshard_dtensor(p.grad) for p in net.parameters())]

    for found in mw.simulate(lambda: gradients(True), 2):
        torch.testing.assert_close(found, gradients(False))


class Mean(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


@pytest.mark.parametrize(
    ("schedule", "error", "says"),
    [
        ("ZB-V", StageError, "chunks on stages"),
        ("DualPipe", StageError, "two copies"),
        ("no such", ScheduleError, "no such"),
        ("R: 1 microbatch\nway: 0 1\n0: F0.0 R0.0 BW0.0\n1: F0.1 BW0.1\n", StageError, "checkpoint"),
    ],
)
def test_schedules_that_cannot_run_eagerly_are_refused(schedule: str, error: type[Exception], says: str) -> None:
    mesh = mw.ProcessMesh([0, 1], ["pp"])
    with pytest.raises(error, match=says):
        mw.microbatched(torch.nn.Linear(2, 2), None, mesh, 4 if "\n" not in schedule else 1, schedule)


def test_another_number_of_batches_is_refused() -> None:
    mesh = mw.ProcessMesh([0, 1], ["pp"])
    with pytest.raises(StageError, match="4 batches"):
        mw.microbatched(torch.nn.Linear(2, 2), None, mesh, 4).accumulate([(torch.ones(1, 2),)])


class Returns(torch.nn.Module):
    """A model whose last layer is the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(x).tanh()).tanh()).square().mean()


class ReadsLater(torch.nn.Module):
    """A model whose first layer's result is multiplied by a parameter of its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b((self.a(x) * self.b.bias).tanh()).square().mean()


class Twice(torch.nn.Module):
    """A model whose stages run twice, on separate inputs: no value returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(self.a(x).tanh()) @ self.b(self.a(x.cos()).tanh()).T).square().mean()


def returned(kind: type[torch.nn.Module], schedule: str, in_stages: bool = True) -> list[torch.Tensor]:
    """Return the gradients on stages by a schedule of four microbatches, or of one device."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 4)
    if not in_stages:
        for part in x.chunk(4):
            (model(part) / 4).backward()
    else:
        mesh = mw.ProcessMesh([0, 1], ["pp"])
        mw.microbatched(mw.split_pipeline(model, mesh, at=["b"]), None, mesh, 4, schedule)(x)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [mw.unshard_dtensor(g) if in_stages else g for g in grads]


@pytest.mark.parametrize("kind", [Returns, ReadsLater])
def test_a_model_that_returns_to_a_stage_runs_by_gpipe_only(kind: type[torch.nn.Module]) -> None:
    for found in mw.simulate(lambda: returned(kind, "GPipe"), 2):
        torch.testing.assert_close(found, returned(kind, "GPipe", in_stages=False))
    with pytest.raises(StageError, match="earlier stage"):
        mw.simulate(lambda: returned(kind, "1F1B"), 2)


def test_stages_may_run_twice() -> None:
    for found in mw.simulate(lambda: returned(Twice, "1F1B"), 2):
        torch.testing.assert_close(found, returned(Twice, "1F1B", in_stages=False))


class Fading(nn.Module):
    """Layers that scale by a buffer, which each forward pass changes, by an operator or through `.data`."""

    scale: Tensor

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.layers, self.by_data = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), by_data
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        (self.scale.data if self.by_data else self.scale).mul_(0.5)
        for layer in self.layers:
            x = layer(x) * self.scale
        return x.square().mean()


def gradients_of_fading(by_data: bool, schedule: str | None) -> list[Tensor]:
    """Return the gradients of two steps of four microbatches."""
    torch.manual_seed(0)
    model, x = Fading(by_data), torch.linspace(-1, 1, 32).reshape(8, 4)
    if schedule is not None:
        mesh = mw.ProcessMesh([0, 1], ["pp"])
        mw.split_pipeline(model, mesh)
        step = mw.microbatched(model, None, mesh, microbatches=4, schedule=schedule)
        for _ in range(2):
            step(x)
    for part in x.chunk(4) * 2 if schedule is None else ():
        (model(part) / 4).backward()
    return [mw.unshard_dtensor(p.grad) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_backward_passes_read_buffers_as_their_forward_pass_left_them(schedule: str, by_data: bool) -> None:
    wanted = gradients_of_fading(by_data, None)
    for found in mw.simulate(lambda: gradients_of_fading(by_data, schedule), 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
