"""Models split into chunks without changes of their code: the boundaries, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine.eager.example_run import ExampleRun
from meshwright.engine.eager.split_pipeline import even_starts
from meshwright.pipeline import StageError


class Encoder(nn.Module):
    """An encoder as in a library: embeddings of words and of places, layers that take a mask, a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(7, 8), nn.Embedding(3, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.inner(x) * mask.unsqueeze(-1)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(0, 7, (8, 3), generator=g) for _ in range(2))
    return tokens, torch.rand((8, 3), generator=g) > 0.3, labels


def losses(stages: int, options: dict[str, Any] | None, **split: Any) -> list[float]:
    torch.manual_seed(0)
    model = Encoder(4)
    if stages:
        mw.split_pipeline(model, mw.ProcessMesh([[s] for s in range(stages)], ["pp", "dp"]), **split)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if options is not None:
        dist = mw.to_static(model, None, loss_of, optimizer, mw.Strategy.of(pipeline={"enable": True, **options}))
        return [dist(*batch()).item() for _ in range(3)]
    found: list[float] = []
    for _ in range(3):
        *inputs, labels = batch()
        loss = loss_of(model(*inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


CASES = [
    (2, None, {}),
    (2, {"accumulate_steps": 4}, {}),
    (2, {"accumulate_steps": 2, "schedule_mode": "1F1B"}, {"at": ["layers.1"]}),
    (4, {"accumulate_steps": 4, "schedule_mode": "ZB-H1"}, {"at": ["layers.1", "layers.2", "head"]}),
    (2, {"accumulate_steps": 2}, {"at": ["layers"]}),
    (2, {"accumulate_steps": 2}, {"at": ["layers.2.inner.1"]}),
    (2, {"accumulate_steps": 4, "schedule_mode": "ZB-V"}, {"way": (0, 1, 1, 0)}),
    (2, {"accumulate_steps": 4, "schedule_mode": "Interleaved 1F1B"}, {"way": (0, 1, 0, 1)}),
]


@pytest.mark.parametrize(("stages", "options", "split"), CASES)
def test_numbers_are_those_of_one_device(stages: int, options: dict[str, Any] | None, split: dict[str, Any]) -> None:
    expected = losses(0, None)
    for found in mw.simulate(lambda: losses(stages, options, **split), stages):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("costs", "chunks", "starts"),
    [((1, 1, 1, 1), 2, [2]), ((5, 1, 1, 1), 2, [1]), ((1, 1, 1, 3), 3, [1, 3]), ((2, 2, 2), 3, [1, 2])],
)
def test_chunks_are_even(costs: Sequence[float], chunks: int, starts: Sequence[int]) -> None:
    layers = [f"l{n}" for n in range(len(costs))]
    found = even_starts(layers, dict(zip(layers, costs, strict=True)), chunks)
    parts = [0, *(layers.index(name) for name in found), len(costs)]
    wanted = [0, *starts, len(costs)]
    dearest = [max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in (parts, wanted)]
    assert dearest[0] == dearest[1]


def test_costs_are_operations_of_an_example() -> None:
    costs = ExampleRun.of(Encoder(2), batch()[:2]).costs()
    assert costs["layers.0.inner.0"] == costs["layers.1.inner.0"] == 2 * 24 * 8 * 16
    assert costs["layers.0"] == 2 * 24 * 8


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ({"at": ["layers.9"]}, "layers.9"),
        ({"at": ["layers.1", "layers.2"]}, "3 chunks"),
        ({"way": (0, 0)}, "stages"),
    ],
)
def test_options_that_do_not_fit_are_refused(split: dict[str, Any], says: str) -> None:
    with pytest.raises(StageError, match=says):
        mw.simulate(lambda: losses(2, None, **split), 2)


class Shuffled(nn.Module):
    """A model with modules in another order than that of their calls, and buffers for its first and its last layer."""

    centre: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.entry = nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(0.5)
        x = self.entry(x + self.shift.exp()) * self.count
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = layer(x * gain).tanh()
        x = self.head(x) - self.centre
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.1)
        return x


def steps_of_shuffled(stages: int, is_static: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Shuffled(), torch.linspace(-1, 1, 16).reshape(4, 4)
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.5), None
    if stages:
        mesh = mw.ProcessMesh(range(stages), ["pp"])
        mw.split_pipeline(model, mesh, example=(x,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options = {"enable": True, "accumulate_steps": 2, "schedule_mode": "ZB-H1"}
        step = (
            mw.to_static(model, None, mean_square, optimizer, mw.Strategy.of(pipeline=options))
            if is_static
            else mw.microbatched(model, mean_square, mesh, microbatches=2)
        )
    for _ in range(2):
        parts = [x] if step is not None else x.chunk(2)
        for part in parts:
            if step is not None:
                step(part, part)
            else:
                (mean_square(model(part), part) / 2).backward()
        if not is_static:
            optimizer.step()
            optimizer.zero_grad()
    return [mw.unshard_dtensor(t.detach()) for t in model.state_dict().values()]


@pytest.mark.parametrize("is_static", [False, True], ids=["eager", "static"])
def test_an_example_gives_the_order_of_calls_and_the_stages_of_buffers(is_static: bool) -> None:
    wanted = steps_of_shuffled(0)
    for found in mw.simulate(lambda: steps_of_shuffled(2, is_static), 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Packed(Shuffled):
    """A model that takes rows by a mask of the batch, and reads their number."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = x[:, 0] > -2
        return super().forward(x)[rows] * float(rows.sum())


def test_a_model_with_an_example_may_read_the_numbers_of_the_batch() -> None:
    def gradients(stages: int) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Packed(), torch.linspace(-1, 1, 16).reshape(4, 4)
        if stages:
            mesh = mw.ProcessMesh(range(stages), ["pp"])
            mw.split_pipeline(model, mesh, example=(x,))
            mw.microbatched(model, mean_square, mesh, microbatches=2)(x, x)
        else:
            for part in x.chunk(2):
                (mean_square(model(part), part) / 2).backward()
        return [mw.unshard_dtensor(p.grad) for p in model.parameters() if p.grad is not None]

    for found in mw.simulate(gradients, 2, 2):
        torch.testing.assert_close(found, gradients(0), rtol=1e-5, atol=1e-6)


def test_numbers_that_the_model_computes_are_refused_with_an_example() -> None:
    class Scaled(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            y: Tensor = super().forward(input)
            return y * float(y.sum())

    model = Scaled(nn.Linear(4, 4), nn.Linear(4, 4))

    def on_rank() -> None:
        mw.split_pipeline(model, mw.ProcessMesh([0, 1], ["pp"]), example=(torch.ones(2, 4),))

    with pytest.raises(mw.CaptureError, match="leave out example="):
        mw.simulate(on_rank, 2)


class TwoLists(nn.Module):
    """A model whose second part is a list of layers, which is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.judged = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(4, 2), nn.Tanh()]), "last": nn.Linear(2, 1)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.made, *self.judged["inner"], self.judged["last"]):  # pyright: ignore[reportGeneralTypeIssues] - a list
            x = layer(x)
        return x


def steps_of_lists(stages: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = TwoLists(), torch.ones(4, 4)
    if stages:
        mesh = mw.ProcessMesh(range(stages), ["pp"])
        mw.split_pipeline(model, mesh, at=["judged"])
        mw.microbatched(model, mean_square, mesh, microbatches=2, schedule="1F1B")(x, torch.ones(4, 1))
    else:
        mean_square(model(x), torch.ones(4, 1)).backward()
    return [mw.unshard_dtensor(p.grad) for p in model.parameters() if p.grad is not None]


def test_layers_of_a_list_enter_the_stage_of_the_list() -> None:
    for found in mw.simulate(lambda: steps_of_lists(2), 2):
        torch.testing.assert_close(found, steps_of_lists(0), rtol=1e-5, atol=1e-6)


class Plain(nn.Module):
    """A model without lists, as in a vision library."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(x)).relu())


class Wrapped(nn.Module):
    """A model and its loss in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


@pytest.mark.parametrize(("at", "first"), [(None, ["enter"]), (["model.leave"], ["enter", "middle"])])
def test_a_model_inside_another_module_is_split(at: list[str] | None, first: list[str]) -> None:
    def step(mesh: mw.ProcessMesh | None) -> tuple[float, list[float], set[str]]:
        torch.manual_seed(0)
        model = Wrapped() if mesh is None else mw.split_pipeline(Wrapped(), mesh, at=at)
        loss = model(torch.ones(2, 8))
        loss.backward()
        begun = {n.split(".")[1] for n, p in model.named_parameters() if mesh and p.spec.mesh == mesh["pp", 0]}
        return loss.item(), [mw.unshard_dtensor(p.grad).sum().item() for p in model.parameters()], begun

    expected = step(None)
    for loss, grads, begun in mw.simulate(lambda: step(mw.ProcessMesh([0, 1], ["pp"])), 2):
        assert [loss, *grads] == pytest.approx([expected[0], *expected[1]], rel=1e-5)
        assert begun == set(first)


def drops(stages: int, microbatches: int) -> list[float]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4))
    model = nn.Sequential(*layers)
    if stages:
        mw.split_pipeline(model, mw.ProcessMesh(range(stages), ["pp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"enable": True, "accumulate_steps": microbatches, "schedule_mode": "1F1B"}
    dist = mw.to_static(model, None, mean_square, optimizer, mw.Strategy.of(pipeline=options)) if stages else None
    found: list[float] = []
    for x in torch.ones(2, 4, 4):
        loss = torch.zeros(()) if dist is None else dist(x, x)
        for part in x.chunk(microbatches) if dist is None else ():
            share = mean_square(model(part), part) / microbatches
            share.backward()
            loss += share.detach()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def mean_square(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().mean()


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 4), (4, 2)])
def test_every_stage_draws_the_random_numbers_of_one_device(stages: int, microbatches: int) -> None:
    expected = drops(0, microbatches)
    for found in mw.simulate(lambda: drops(stages, microbatches), stages):
        assert found == pytest.approx(expected, rel=1e-5)


class Tower(nn.Module):
    """A model with a learned token at its input and a scale at its output, which belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)[: len(x)]  # all of it
        return (self.layers[1](x + self.token) * self.scale.exp()).square().mean()


@pytest.mark.parametrize("static", [False, True])
def test_parameters_outside_layers_have_gradients_on_every_rank(static: bool) -> None:
    def on_rank(split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Tower()
        if split:
            mw.split_pipeline(model, mw.ProcessMesh([0, 1], ["pp"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if static and split:
            mw.to_static(model, None, None, optimizer, mw.Strategy.of(pipeline={"enable": True}))(torch.ones(2, 4))
        else:
            model(torch.ones(2, 4)).backward()
            optimizer.step()
        return [mw.unshard_dtensor(p.detach()) for p in model.parameters()]

    for found in mw.simulate(lambda: on_rank(True), 2):
        torch.testing.assert_close(found, on_rank(False))


def rows_apart(stages: int, **options: Any) -> list[float]:
    """Return losses of a chain whose inputs are sharded over replicas and whose labels have no mark."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    if stages:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
        mw.split_pipeline(model, mesh, batch=[mw.Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = mw.to_static(model, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(**options))
    return [step(x, y).item() for _ in range(2)]


def test_microbatches_of_replicas_match_rows_and_labels() -> None:
    wanted = mw.simulate(lambda: rows_apart(0), 1)[0]
    found = mw.simulate(lambda: rows_apart(2, pipeline={"enable": True, "accumulate_steps": 4}), 4)
    assert found[0] == pytest.approx(wanted, rel=1e-5)
