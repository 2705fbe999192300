"""In-place reuse: the same bits for all kinds of programs, and no second copy of values that are written back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.graph import Value, alias_classes, live_memory, overwriting, written_inputs
from meshwright.passes import InPlace, Recompute

from .random_programs import program, random_program, results
from .steps import assert_same, llama_step, plain, recorded

aten = torch.ops.aten


@pytest.mark.parametrize("block", range(8))
def test_random_programs_keep_their_bits(block: int) -> None:
    written = 0
    for seed in range(50 * block, 50 * block + 50):
        program = random_program(seed)
        changed = InPlace()(program)
        written += changed is not program
        before, after = ([*outputs, *left] for outputs, left in (results(program, seed), results(changed, seed)))
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b) or a.isnan().equal(b.isnan()), f"seed {seed}\n{program}\n{changed}"
    assert written > 20


def _turned(add: Any, x: Value, y: Value) -> Any:
    """Return outputs and writes of a program: x gets a view of the value that could overwrite it."""
    return (), [(x, add(aten.t.default, add(aten.neg.default, x)))]


def _kept(add: Any, x: Value, y: Value) -> Any:
    """Return outputs and writes of a program: the value that is written back is also returned."""
    new = add(aten.neg.default, x)
    return add(aten.t.default, new), [(x, new)]


def _lain_otherwise(add: Any, x: Value, y: Value) -> Any:
    """Return outputs and writes of a program: the dying operand has another memory order than the result."""
    turned = add(aten.t.default, add(aten.mm.default, x, y))
    return add(aten.view.default, add(aten.add.Tensor, y, turned), [-1]), ()


def _seen_twice(add: Any, x: Value, y: Value) -> Any:
    """Return outputs and writes of a program: an operator reads other elements of memory that it could overwrite."""
    new = add(aten.mm.default, x, y)
    return add(aten.add.Tensor, new, add(aten.t.default, new)), ()


@pytest.mark.parametrize("build", [_turned, _kept, _lain_otherwise, _seen_twice])
def test_values_that_must_not_be_overwritten(build: Any) -> None:
    made = program(build, (4, 4), (4, 4))
    assert InPlace()(made) is made


@pytest.mark.parametrize("change", [InPlace(), InPlace(inputs=False)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2)])
def test_a_step_keeps_its_bits(shape: tuple[int, int, int], change: InPlace) -> None:
    step = llama_step(shape)
    assert_same(step, step.changed(change))


def test_values_written_back_have_one_memory() -> None:
    step = llama_step()
    programs = step.changed(InPlace())
    for each in programs:
        found = alias_classes(each)
        assert all(found.of(x) is found.of(v) for x, v in each.writes)
    for each, (_, written, left) in zip(programs, step.run(programs), strict=True):
        after = {i.value: left[at] for at, i in enumerate(each.inputs)}
        assert all(torch.equal(after[x], t) for (x, _), t in zip(each.writes, written, strict=True))


def test_the_update_needs_no_more_than_its_inputs_and_one_parameter() -> None:
    step = llama_step((1, 1, 1))
    program = step.programs[0]
    changed = InPlace()(program)
    update = [live_memory(p).peak_in("update") - live_memory(p).held for p in (program, changed)]
    largest = max(i.value.nbytes for i in program.inputs if i.role == "parameter")
    grads = sum(i.value.nbytes for i in program.inputs if i.role == "parameter")
    written = sum(v.nbytes for _, v in program.writes)
    assert update[0] > written
    assert update[1] < grads + 3 * largest
    assert "126 of them an input" in changed.changes[-1].what


def test_it_works_with_recompute() -> None:
    step = llama_step()
    assert_same(step, step.changed(lambda p: InPlace()(Recompute(("blocks.*",))(p))))


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"maximize": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {}),
    ("Adamax", {}),
    ("NAdam", {}),
]


class Tied(nn.Module):
    """A network whose first and last layers share their matrix, with a norm that has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)).relu()).square().mean()


@pytest.mark.parametrize(("optimizer", "how"), OPTIMIZERS, ids=str)
def test_every_optimizer_keeps_its_bits(optimizer: str, how: dict[str, Any]) -> None:
    step = recorded(Tied, (torch.randn(5, 6),), 1, optimizer, **how)
    changed = step.changed(InPlace())
    assert_same(step, changed)
    assert "an input" in changed[0].changes[-1].what


@pytest.mark.parametrize("how", [(), (InPlace(),)])
def test_training_continues_in_place(how: tuple[Any, ...]) -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        m = Tied()
        opt = torch.optim.AdamW(m.parameters(), lr=0.1)
        dist = mw.to_static(m, None, None, opt, strategy=plain(passes=how))
        losses = [dist(torch.ones(5, 6) * at).item() for at in range(5)]
        return [*losses, *(p.sum().item() for p in m.state_dict().values())]

    assert mw.simulate(train, 1)[0] == mw.simulate(lambda: _eager(5), 1)[0]


def _eager(steps: int) -> list[float]:
    torch.manual_seed(0)
    m = Tied()
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)
    losses: list[float] = []
    for at in range(steps):
        loss = m(torch.ones(5, 6) * at)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return [*losses, *(p.sum().item() for p in m.state_dict().values())]


def test_one_program_for_batches_of_all_sizes_writes_in_place() -> None:
    def train(*how: Any) -> list[float]:
        torch.manual_seed(0)
        m = Tied()
        opt = torch.optim.AdamW(m.parameters(), lr=0.1)
        dist = mw.to_static(m, None, None, opt, strategy=plain(passes=how))
        return [dist(torch.randn(n, 6)).item() for n in (5, 5, 7, 9, 3, 8)]

    assert mw.simulate(train, 1, InPlace()) == mw.simulate(train, 1)


def test_overlapping_inputs_are_not_overwritten() -> None:
    class Flat(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            flat = torch.arange(72.0) / 72
            self.a = nn.Parameter(flat[:36].view(6, 6))
            self.register_buffer("b", (flat[36:] if apart else flat[:36]).view(6, 6))

        def forward(self, x: Any) -> Any:
            return (x @ self.a @ self.b).sum()

    def train(apart: bool, *how: Any) -> tuple[float, bool]:
        m = Flat(apart)
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        dist = mw.to_static(m, None, None, opt, strategy=plain(passes=how))
        dist(torch.ones(2, 6))
        return dist(torch.ones(2, 6)).item(), bool(written_inputs(dist.program))

    for apart in (True, False):
        (before, _), (after, renewed) = mw.simulate(train, 1, apart)[0], mw.simulate(train, 1, apart, InPlace())[0]
        assert after == before
        assert renewed is apart


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (aten.add.Tensor, "aten.add_.Tensor"),
        (aten._foreach_add.Scalar, "aten._foreach_add_.Scalar"),
        (aten.t.default, None),
        (aten.squeeze.dim, None),
        (aten.bernoulli.p, None),
        (aten._fused_adamw.default, None),
    ],
)
def test_operators_that_overwrite_their_first_operand(op: Any, name: str | None) -> None:
    twin = overwriting(op)
    assert (None if twin is None else str(twin)) == name
