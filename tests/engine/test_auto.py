"""A model without a mark: mesh and shardings are chosen, and the numbers are those of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._static_models import SUBJECTS, Subject
from meshwright.cost import Cluster, cluster_of
from meshwright.engine.planning.auto import states_of
from meshwright.engine.planning.suggest import suggest
from meshwright.graph import ALWAYS, capture, live_memory
from meshwright.models import Llama, LlamaConfig
from meshwright.pipeline import StageError
from meshwright.search import MemorySaving, MeshPlan, Pipelining, SearchError, parse_mesh_plan, plan_mesh
from tests.search.chains import ODD, Blocks

STEPS = 3
AGAIN = MemorySaving(0, ("layers.*",))
"""Layers that are recomputed."""


def trained_alone(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> list[float]:
    """Return the losses of steps on one device."""
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def alone(subject: Subject) -> list[float]:
    """Return the losses of one device."""
    torch.manual_seed(0)
    model, batches = subject.make().eval(), map(subject.batch, count())

    def loss() -> Tensor:
        inputs, wanted = next(batches)
        return model(inputs, wanted) if subject.loss is None else subject.loss(model(inputs), wanted)

    return trained_alone(torch.optim.SGD(model.parameters(), lr=0.1), loss)


def machines(memory: float) -> Cluster:
    """Return a cluster of cores with so many bytes each."""
    usual = cluster_of("cpu core")
    return replace(usual, device=replace(usual.device, memory=memory))


@pytest.mark.parametrize(("name", "ranks"), [("mlp", 2), ("llama", 2), ("llama", 4), ("bert", 2), ("moe", 4)])
def test_the_chosen_plan_gives_the_numbers_of_one_device(name: str, ranks: int) -> None:
    subject = SUBJECTS[name]

    def on_rank() -> tuple[list[float], MeshPlan]:
        torch.manual_seed(0)
        model = subject.make().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.auto(model, [subject.batch(0)], subject.loss, optimizer, cluster=machines(4e9))
        step.train()
        model.eval()
        assert step.plan is not None
        return [step(*subject.batch(seed)).item() for seed in range(STEPS)], step.plan

    wanted = alone(subject)
    for losses, plan in mw.simulate(on_rank, ranks):
        assert plan.dp * plan.tp == ranks
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_a_model_is_sharded_if_memory_is_small() -> None:
    def on_rank() -> tuple[list[float], MeshPlan, list[int]]:
        torch.manual_seed(0)
        subject = SUBJECTS["llama"]
        model = subject.make().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.auto(model, [subject.batch(0)], optimizer=optimizer, cluster=machines(memory=150e3))
        model.eval()
        losses = [step(*subject.batch(seed)).item() for seed in range(STEPS)]
        assert step.plan is not None
        return losses, step.plan, [p.to_local().numel() for p in model.parameters() if isinstance(p, mw.DistTensor)]

    wanted = alone(SUBJECTS["llama"])
    whole = sum(p.numel() for p in SUBJECTS["llama"].make().parameters())
    for losses, plan, parts in mw.simulate(on_rank, 4):
        assert plan.tp > 1 or plan.saving.zero == 3
        assert sum(parts) < 0.7 * whole
        assert losses == pytest.approx(wanted, rel=1e-4)


def labelled(seed: int, subject: Subject) -> tuple[Tensor, Tensor]:
    """Return a batch in which no label is ignored."""
    inputs, wanted = subject.batch(seed)
    return inputs, wanted.clamp(min=0)


def adam(subject: Subject, step_of: Any) -> list[float]:
    """Return the losses of the steps from `step_of(model, optimizer)`."""
    torch.manual_seed(0)
    model = subject.make().eval()
    step = step_of(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    model.eval()
    return [step(*labelled(seed, subject)).item() for seed in range(STEPS)]


def one_device(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def trained_as(plan: MeshPlan, subject: Subject, ranks: int) -> Any:
    """Return the losses of each rank, and its step."""

    def on_rank() -> tuple[list[float], Any]:
        found: list[Any] = []

        def made(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            found.append(mw.auto(model, [labelled(0, subject)], optimizer=optimizer, plan=plan))
            return found[0].train()

        return adam(subject, made), found[0]

    return mw.simulate(on_rank, ranks)


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    return adam(SUBJECTS["llama"], one_device)


@pytest.mark.parametrize(
    ("ranks", "memory", "saving"),
    [
        (4, 320e3, MemorySaving(1)),
        (4, 250e3, MemorySaving(3)),
        (4, 205e3, MemorySaving(1, ("blocks.*",))),
        (1, 400e3, MemorySaving(0, ("blocks.*",), 4)),
    ],
)
def test_memory_saving_options_are_chosen_and_applied(
    ranks: int, memory: float, saving: MemorySaving, wanted: list[float]
) -> None:
    subject = SUBJECTS["llama"]
    model = subject.make().eval()
    plan, *others = mw.plan(model, labelled(0, subject), cluster=machines(memory), ranks=ranks, stages=1)
    assert plan.saving == saving
    assert str(saving) in str(plan)
    for each in (plan, *others):
        assert parse_mesh_plan(each.text()) == each
        assert each.nbytes <= 0.94 * memory
        (curve,) = each.account().curves
        assert max(held for _, held in curve.points) == pytest.approx(each.nbytes, rel=0.1)
        assert curve.points[-1][1] == pytest.approx(curve.points[0][1])
    for losses, step in trained_as(parse_mesh_plan(plan.text()), subject, ranks):
        assert losses == pytest.approx(wanted, rel=1e-4)
        done = " ".join(map(str, step.program.changes))
        assert ("recompute" in done) == bool(saving.recompute)
        assert any(change.by == "merge" for change in step.program.changes) == (saving.accumulate > 1)
        assert ("shard_parameters" in done) == (saving.zero == 3)
        assert max(live_memory(step.program).live) <= 1.03 * plan.nbytes


def test_memory_saving_options_of_the_user_are_added_to_a_plan(wanted: list[float]) -> None:
    subject, saving = SUBJECTS["llama"], MemorySaving(3, ("blocks.*",))
    plan = mw.plan(subject.make().eval(), labelled(0, subject), cluster=machines(250e3), ranks=4, stages=1)[0]
    for losses, step in trained_as(replace(plan, saving=saving), subject, 4):
        assert losses == pytest.approx(wanted, rel=1e-4)
        done = " ".join(map(str, step.program.changes))
        assert "recompute" in done
        assert "shard_parameters" in done


@pytest.mark.parametrize("saving", [True, False])
def test_the_error_names_the_least_memory_that_suffices(saving: bool) -> None:
    model, batch = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3))), [torch.empty(8, 96, device="meta")]
    program = capture(model, lambda x: model(x).square().mean(), batch).program
    with pytest.raises(SearchError) as caught:
        plan_mesh(program, machines(1e3), 4, saving=saving, stages=1)
    said = re.fullmatch(r"use devices of ([\d.]+) kB .*", caught.value.write)
    assert said, caught.value
    named = float(said[1]) * 1e3
    assert plan_mesh(program, machines(named), 4, saving=saving, stages=1)
    with pytest.raises(SearchError):
        plan_mesh(program, machines(0.99 * named), 4, saving=saving, stages=1)


def test_a_sharded_sequence_takes_no_more_memory_than_predicted() -> None:
    def made() -> Llama:
        torch.manual_seed(0)
        return Llama(LlamaConfig(vocab=512, hidden=64, layers=2, heads=1, kv_heads=1, feed_forward=256))

    batch = tuple(torch.randint(512, (1, 1024)) for _ in range(2))
    plan = mw.plan(made(), batch, cluster="4xA100", ranks=4)[0]

    def on_rank() -> int:
        model = made()
        step = mw.auto(model, [batch], optimizer=torch.optim.Adam(model.parameters()), plan=plan)
        step(*batch)
        return live_memory(step.program).peak

    for peak in mw.simulate(on_rank, 4):
        assert 0.9 * plan.nbytes <= peak <= 1.03 * plan.nbytes


@pytest.mark.parametrize("saving", [MemorySaving(0, ("blocks.0",), 2), MemorySaving(1, (), 2)])
def test_all_tensors_of_a_batch_in_pieces_have_the_same_layout(saving: MemorySaving, wanted: list[float]) -> None:
    subject = SUBJECTS["llama"]
    found = mw.plan(subject.make().eval(), labelled(0, subject), cluster=machines(4e9), ranks=4)
    plan = next(p for p in found if (p.dp, p.tp) == (2, 2))
    for losses, _ in trained_as(replace(plan, saving=saving), subject, 4):
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_pieces_with_unequal_weight_are_neither_chosen_nor_accepted() -> None:
    subject = SUBJECTS["llama"]  # its batches have ignored labels
    model, cluster = subject.make().eval(), machines(400e3)
    with pytest.raises(SearchError, match="number of ignored labels"):
        mw.plan(model, subject.batch(0), cluster=cluster, ranks=1)
    plan, *_ = mw.plan(model, labelled(0, subject), cluster=cluster, ranks=1)
    assert plan.saving.accumulate > 1
    assert "no label is ignored" in plan.text()

    def on_rank() -> None:
        step = mw.auto(model, [labelled(0, subject)], optimizer=torch.optim.SGD(model.parameters(), 0.1), plan=plan)
        step(*subject.batch(0))

    with pytest.raises(SearchError, match="equally many labels count"):
        mw.simulate(on_rank, 1)


class Recurrent(nn.Module):
    """Two states that all steps of a sequence use."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            c = c * self.gate(h).sigmoid() + self.into(x[:, t])
            h = (h + c).tanh() * c.exp().sigmoid()
        return self.out(h + c)


def test_a_module_too_wide_for_a_proof_still_gets_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(8, 4, 8), torch.randn(8, 8)

    def losses(plan: MeshPlan | None) -> list[float]:
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.auto(model, [batch], nn.functional.mse_loss, optimizer, plan=plan)
        return [step(*batch).item() for _ in range(STEPS)]

    def found() -> MeshPlan:
        plans = mw.plan(Recurrent(), batch, nn.functional.mse_loss, cluster=machines(4e9), ranks=2)
        return next(p for p in plans if p.tp == 2)

    best = found()
    monkeypatch.setattr("meshwright.search.sharding.sharding_search.MOST", 20)
    plan = found()
    assert best.notes == ()
    assert "not proved" in plan.notes[0]
    assert plan.notes[0] in str(plan)
    assert plan.cuts is not None
    assert best.seconds <= plan.seconds <= best.seconds * (1 + plan.cuts.gap) * (1 + 1e-9)
    wanted = mw.simulate(lambda: losses(None), 1)[0]
    assert mw.simulate(lambda: losses(plan), 2)[0] == pytest.approx(wanted, rel=1e-4)


def test_simulated_ranks_search_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    search: Any = plan_mesh

    def counted(program: Any, cluster: Any, ranks: int, *rest: Any) -> Any:
        asked.append(ranks)
        return search(program, cluster, ranks, *rest)

    monkeypatch.setattr("meshwright.engine.planning.auto.plan_mesh", counted)
    plans = mw.simulate(lambda: losses_under(None)[2], 4)
    assert asked == [4]
    assert all(plan == plans[0] for plan in plans)


def test_a_plan_needs_no_devices() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=32000, hidden=4096, layers=2, heads=32, kv_heads=8, feed_forward=14336))
        batch = [torch.empty(64, 2048, dtype=torch.long) for _ in range(2)]
    found = mw.plan(model, batch, cluster="64xH100, 8 per node, 400G")
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert all(p.dp * p.tp == 64 for p in found)
    assert "replicas" in str(found[0])
    with pytest.raises(SearchError, match="GB are missing"):
        mw.plan(model, batch, cluster="1xV100-1G")


def test_an_indivisible_batch_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Any:
            return (x @ self.w).sum()

    found = mw.plan(Odd(), [torch.ones(5, 3)], cluster="4xA100")
    assert [(p.dp, p.tp) for p in found] == [(1, 4)]


WRITTEN = """
[mesh]
dp = 2
tp = 2
[layouts]
"0.weight" = "f32[32@tp, 8]"
"2.weight" = "f32[8, 32@tp]"
batch_0 = "f32[16@dp, 8]"
"""


def losses_under(plan: MeshPlan | None) -> tuple[list[float], dict[str, Any], MeshPlan | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    step = mw.auto(model, [(x, y)], nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    losses = [step(x, y).item() for _ in range(STEPS)]
    return (
        losses,
        {name: repr(p.spec) for name, p in model.named_parameters() if isinstance(p, mw.DistTensor)},
        step.plan,
    )


def test_a_plan_by_the_user_is_used_unchanged() -> None:
    plan = parse_mesh_plan(WRITTEN)
    wanted = mw.simulate(lambda: losses_under(None), 1)[0][0]
    for losses, specs, taken in mw.simulate(lambda: losses_under(plan), 4):
        assert taken == plan
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert specs["0.weight"] == "f32[32@tp, 8]"
        assert specs["2.weight"] == "f32[8, 32@tp]"
        assert specs["0.bias"] == "f32[32@tp]"  # the plan omits fields that follow from others


def test_a_found_plan_trains_after_it_is_written_and_read() -> None:
    def found() -> MeshPlan:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        batch = torch.randn(16, 8), torch.randn(16, 8)
        return mw.plan(model, batch, nn.functional.mse_loss, cluster=machines(4e9), ranks=4)[-1]

    plan = found()
    losses, *_ = mw.simulate(lambda: losses_under(parse_mesh_plan(plan.text())), 4)[0]
    assert losses == pytest.approx(mw.simulate(lambda: losses_under(plan), 4)[0][0], rel=1e-6)


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        (WRITTEN, 2, "the mesh of the plan has 4"),
        (WRITTEN.replace("0.weight", "0.weigth"), 4, "fix:   write 0.weight"),
    ],
)
def test_a_plan_for_something_else_is_refused(text: str, ranks: int, said: str) -> None:
    with pytest.raises(SearchError) as caught:
        mw.simulate(lambda: losses_under(parse_mesh_plan(text)), ranks)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0.0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1.0),
        (torch.optim.AdamW, 2.0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3.0),
    ],
)
def test_a_plan_counts_the_states_of_the_optimizer(kind: Any, states: float) -> None:
    """Parameters of 4 MB, a gradient, the states, and the temporary memory of an update."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    batch = [torch.ones(1, 1024), torch.ones(1, 1024)]
    plan = mw.plan(model, batch, nn.functional.mse_loss, kind(model.parameters()), cluster="1xH100")[0]
    assert plan.nbytes / 2**22 == pytest.approx(3 + states, rel=0.01)
    held = plan.account().held["every rank"]
    assert held["parameters, gradients, optimizer"] / 2**22 == pytest.approx(3 + states, rel=0.01)


class Bytes(torch.optim.Optimizer):
    """An optimizer whose two states have a byte per parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            self.state[p] = {name: torch.zeros_like(p, dtype=torch.uint8) for name in ("mean", "square")}


def test_an_unknown_optimizer_counts_as_adam() -> None:
    class Odd(torch.optim.Optimizer):
        def __init__(self, params: Any, needed: int) -> None:
            super().__init__(params, {})

    assert states_of(Odd([nn.Parameter(torch.ones(2))], 1)) == 2.0
    assert states_of(Bytes([nn.Parameter(torch.ones(2))])) == pytest.approx(0.5)
    assert states_of(torch.optim.Adafactor([nn.Parameter(torch.ones(2))])) == pytest.approx(2 / 64)


@pytest.mark.parametrize(
    ("layers", "memory", "ranks", "way"),
    [(4, 26e6, 4, ()), (4, 45e6, 2, (0, 1, 1, 0)), (8, 90e6, 2, (0, 1, 0, 1, 0, 1))],
)
def test_a_model_that_fits_only_in_stages_trains_in_stages(
    layers: int, memory: float, ranks: int, way: tuple[int, ...]
) -> None:
    small = machines(memory)
    x, y = torch.randn(4, ODD, generator=torch.Generator().manual_seed(1)), torch.zeros(4, ODD)
    loss = nn.functional.mse_loss

    def model() -> Blocks:
        torch.manual_seed(0)
        return Blocks(layers)

    def on_rank() -> tuple[list[float], dict[str, Tensor], MeshPlan]:
        own = model()
        step = mw.auto(own, [(x, y)], loss, torch.optim.AdamW(own.parameters(), lr=0.01, eps=1e-4), cluster=small)
        assert step.plan is not None
        losses = [step(x, y).item() for _ in range(STEPS)]
        return losses, {name: mw.unshard_dtensor(p.detach()) for name, p in own.named_parameters()}, step.plan

    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-4)
    wanted = trained_alone(optimizer, lambda: loss(alone(x), y))
    for losses, weights, plan in mw.simulate(on_rank, ranks):
        assert plan.pipeline is not None
        assert plan.pipeline.stages == ranks
        assert plan.pipeline.way == way
        assert losses == pytest.approx(wanted, rel=1e-5)
        for name, p in alone.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-4, atol=1e-5)


def test_stages_with_sharded_weights_train_like_one_device() -> None:
    x, y = torch.randn(1024, 998, generator=torch.Generator().manual_seed(1)), torch.zeros(1024, 998)
    loss = nn.functional.mse_loss
    torch.manual_seed(0)
    alone = Blocks(2, 998)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    wanted = trained_alone(optimizer, lambda: loss(alone(x), y))

    def on_rank() -> tuple[list[float], MeshPlan]:
        torch.manual_seed(0)
        model = Blocks(2, 998)
        step = mw.auto(model, [(x, y)], loss, torch.optim.AdamW(model.parameters(), lr=0.01), cluster=machines(14e6))
        assert step.plan is not None
        return [step(x, y).item() for _ in range(STEPS)], step.plan

    for losses, plan in mw.simulate(on_rank, 4):
        assert plan.mesh.sizes == {"pp": 2, "dp": 1, "tp": 2}
        assert plan.layouts["layers.0.inner.weight"].layout.cut_axes == ("tp",)
        assert losses == pytest.approx(wanted, rel=1e-5)


LAYERS = "layers.1", "layers.2", "layers.3"


@pytest.mark.parametrize(
    ("how", "saving"),
    [
        (Pipelining(("layers.2",), "1F1B", 4), MemorySaving(1)),
        (Pipelining(("layers.1",), "ZB-H1", 2), AGAIN),
        (Pipelining(LAYERS, "Interleaved 1F1B", 4, (0, 1, 0, 1)), MemorySaving(1)),
        (Pipelining(LAYERS, "Interleaved zero bubble", 4, (0, 1, 0, 1)), AGAIN),
        (Pipelining(LAYERS, "V-Min", 4, (0, 1, 1, 0)), MemorySaving(1)),
    ],
)
def test_a_pipeline_changed_by_the_user_is_used(how: Pipelining, saving: MemorySaving) -> None:
    x, y = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 12)
    loss = nn.functional.mse_loss
    torch.manual_seed(0)
    alone = Blocks(4, 12)
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
    wanted = trained_alone(optimizer, lambda: loss(alone(x), y))
    plan = mw.plan(Blocks(4, 12), (x, y), loss, ranks=4, stages=2)[0]
    changed = parse_mesh_plan(replace(plan, pipeline=how, saving=saving).text())

    def on_rank() -> list[float]:
        torch.manual_seed(0)
        model = Blocks(4, 12)
        step = mw.auto(model, [(x, y)], loss, torch.optim.SGD(model.parameters(), lr=1.0), plan=changed)
        return [step(x, y).item() for _ in range(STEPS)]

    assert wanted[-1] < wanted[0]
    assert mw.simulate(on_rank, 4)[0] == pytest.approx(wanted, rel=1e-5)


def test_a_suggested_placement_of_chunks_is_used_by_parallelize() -> None:
    x, y = torch.ones(4, ODD), torch.zeros(4, ODD)
    found = suggest(Blocks(), (x, y), nn.functional.mse_loss, ranks=2, cluster=machines(45e6))
    assert (found.config.split, found.config.way) == (LAYERS, (0, 1, 1, 0))
    assert "way=(0, 1, 1, 0)" in found.text()
    assert "microbatches by ZB-V" in found.text()

    def on_rank() -> list[tuple[int, ...]]:
        model, _ = mw.parallelize(Blocks(), None, found.mesh, found.config)
        return [p.mesh.process_ids for p in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]

    assert mw.simulate(on_rank, 2)[0] == [(0,), (1,), (1,), (0,)]


IN_STAGES = """
split = ["layers.2"]
schedule = "ZB-H1"
microbatches = 4
zero = {}
[mesh]
pp = 2
dp = 2
[layouts]
batch_0 = "f32[16@dp, 64]"
batch_1 = "f32[16@dp, 64]"
"""


def test_stages_accumulate_whole_gradients_and_gather_weights_once_under_zero() -> None:
    """The search ends at stage 1 of ZeRO: 2 is the same program, and 3 holds whole weights and a part."""
    x, y = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), torch.zeros(16, 64)
    loss = nn.functional.mse_loss
    torch.manual_seed(0)
    alone = Blocks(4, 64)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    wanted = trained_alone(optimizer, lambda: loss(alone(x), y))

    def on_rank(zero: int) -> tuple[list[float], list[tuple[str, str, int | None]]]:
        torch.manual_seed(0)
        model = Blocks(4, 64)
        plan = parse_mesh_plan(IN_STAGES.format(zero))
        step = mw.auto(model, [(x, y)], loss, torch.optim.AdamW(model.parameters(), lr=0.01), plan=plan)
        losses = [step(x, y).item() for _ in range(STEPS)]
        sent = [(str(n.op), n.origin.phase, n.origin.chunk) for n in step.program.nodes]
        return losses, [one for one in sent if one[0].startswith(("AllGather", "ReduceScatter"))]

    found = {zero: mw.simulate(on_rank, 4, zero)[0] for zero in (1, 2, 3)}
    for losses, sent in found.values():
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert [op for op, *_ in sent].count("ReduceScatter(dp, dim 0)") == 1
        assert [op for op, *_ in sent].count("AllGather(dp, dim 0)") == 1
    assert found[1][1] == found[2][1]
    assert ("AllGather(dp, dim 0)", "forward", ALWAYS) in found[3][1]


def test_a_schedule_with_another_placement_of_chunks_is_refused() -> None:
    x, y = torch.ones(8, 12), torch.zeros(8, 12)
    plan = mw.plan(Blocks(4, 12), (x, y), nn.functional.mse_loss, ranks=2, stages=2)[0]
    wrong = replace(plan, pipeline=Pipelining(LAYERS, "ZB-V", 4, (0, 1, 0, 1)), saving=MemorySaving())

    def on_rank() -> None:
        model = Blocks(4, 12)
        mw.auto(model, [(x, y)], nn.functional.mse_loss, torch.optim.AdamW(model.parameters()), plan=wrong)(x, y)

    with pytest.raises(StageError, match="marks put its chunks on stages"):
        mw.simulate(on_rank, 2)


class Around(nn.Module):
    """Layers between weights that the model holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.scale = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.wide
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


@pytest.mark.parametrize("wide", ["f32[8, 8@tp]", "f32[8@tp, 8]", "f32[8, 8]"])
def test_a_weight_outside_the_layers_is_on_the_stage_of_the_plan(wide: str) -> None:
    plan = parse_mesh_plan(
        f"""
        split = ["layers.2"]
        microbatches = 2
        [mesh]
        pp = 2
        dp = 1
        tp = 2
        [layouts]
        wide = "{wide}"
        """
    )
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 8, generator=g), torch.randn(4, 8, generator=g)
    loss = nn.functional.mse_loss

    def model() -> Around:
        torch.manual_seed(0)
        return Around()

    def on_rank() -> tuple[list[float], str, tuple[int, ...], tuple[int, ...]]:
        own = model()
        step = mw.auto(own, [(x, y)], loss, torch.optim.SGD(own.parameters(), lr=0.1), plan=plan)
        laid, last = own.wide, own.scale
        losses = [step(x, y).item() for _ in range(STEPS)]
        return losses, repr(laid.spec), laid.mesh.process_ids, last.mesh.process_ids

    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    wanted = trained_alone(optimizer, lambda: loss(alone(x), y))
    for losses, laid, first, last in mw.simulate(on_rank, 4):
        assert (laid, first, last) == (wide, (0, 1), (2, 3))
        assert losses == pytest.approx(wanted, rel=1e-5)
