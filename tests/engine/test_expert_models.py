"""Models with experts: grouped, batched and looped; routers, their losses, and shared experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from benchmarks import experts as figure
from meshwright.comm import current_communicator

Tensors = list[Tensor]
R, ROWS, COLUMNS, DEEP = mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Shard(2)
EXPERTS, DIM, HIDDEN, CHOICES, TOKENS = 5, 8, 12, 2, 13


def grouped(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the output as most models compute it now: rows are sorted, and products are grouped."""
    ids, order = indices.reshape(-1).sort()
    rows = x[order // CHOICES]
    ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    made = F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    return made[order.argsort()].view(-1, CHOICES, DIM).sum(1)


def batched(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the output with a copy of its expert's matrices for each row."""
    ids, rows = indices.reshape(-1), x.repeat_interleave(CHOICES, 0).unsqueeze(1)
    made = torch.bmm(F.silu(torch.bmm(rows, up[ids])), down[ids]).squeeze(1)
    return (made * weights.reshape(-1, 1)).view(-1, CHOICES, DIM).sum(1)


def looped(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the output with one expert after the other."""
    out = torch.zeros_like(x)
    chosen = F.one_hot(indices, EXPERTS).permute(2, 1, 0)
    for n in chosen.sum((-1, -2)).nonzero().flatten().tolist():
        choice, row = torch.where(chosen[n])
        made = F.silu(x[row] @ up[n]) @ down[n] * weights[row, choice, None]
        out = out.index_add(0, row, made)
    return out


def dense(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the output with each expert computing each row."""
    share = torch.zeros(x.shape[0], EXPERTS).to(x.dtype).scatter(1, indices, weights)
    made = torch.einsum("teh,ehd->ted", F.silu(torch.einsum("td,edh->teh", x, up)), down)
    return torch.einsum("te,ted->td", share, made)


def dispatched(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    def experts(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)

    return mw.dispatch_experts(x, indices, weights, experts, [up, down])


def bounded(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    def experts(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)

    return mw.dispatch_experts(x, indices, weights, experts, [up, down], capacity=4)


STYLES: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (grouped, batched, looped, dense, dispatched, bounded)
}


class Mixture(nn.Module):
    """A router, experts, a shared expert for all tokens, and the losses of the router."""

    def __init__(self, style: str) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.style = STYLES[style]
        self.router, self.shared = nn.Linear(DIM, EXPERTS, bias=False), nn.Linear(DIM, DIM)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN, generator=g) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM, generator=g) / 3)
        with torch.no_grad():
            for p in (*self.router.parameters(), *self.shared.parameters()):
                p.copy_(torch.randn(p.shape, generator=g) / 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        chances = logits.softmax(-1)
        weights, indices = chances.topk(CHOICES)
        out = self.style(x, indices, weights / weights.sum(-1, keepdim=True), self.up, self.down)
        return out + self.shared(x).sigmoid(), balance(chances, indices) + 0.1 * z_loss(logits)


def balance(chances: Tensor, indices: Tensor) -> Tensor:
    """Return shares of the tokens times mean chances (Fedus et al., Switch Transformers, 2021)."""
    share = F.one_hot(indices, EXPERTS).to(chances.dtype).mean((0, 1))
    return EXPERTS * (share * chances.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the z-loss of Zoph et al., ST-MoE, 2022."""
    return logits.logsumexp(-1).square().mean()


LAYOUTS: dict[str, tuple[mw.ProcessMesh, list[mw.Placement], list[mw.Placement], list[mw.Placement]]] = {
    "dp": (mw.ProcessMesh([0, 1, 2], ["dp"]), [ROWS], [R], [R]),
    "ep": (mw.ProcessMesh([0, 1, 2], ["ep"]), [ROWS], [ROWS], [ROWS]),
    "ep, tokens whole": (mw.ProcessMesh([0, 1, 2], ["ep"]), [R], [ROWS], [ROWS]),
    "tp": (mw.ProcessMesh([0, 1, 2], ["tp"]), [R], [DEEP], [COLUMNS]),
    "dp × ep": (mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"]), [ROWS, ROWS], [R, ROWS], [R, ROWS]),
    "ep × tp": (mw.ProcessMesh([[0, 1], [2, 3]], ["ep", "tp"]), [ROWS, R], [ROWS, DEEP], [ROWS, COLUMNS]),
}
"""Mesh, and placements of the tokens and of the first and second matrices of the experts."""


def laid(model: Mixture, case: str) -> Mixture:
    mesh, _, up, down = LAYOUTS[case]
    model.up, model.down = mw.shard_tensor(model.up, mesh, up), mw.shard_tensor(model.down, mesh, down)
    mw.shard_layer(model, mesh)
    return model


def batch(seed: int, case: str | None) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    both = [torch.randn(TOKENS, DIM, generator=g) for _ in range(2)]
    if case is None:
        return both
    mesh, rows, _, _ = LAYOUTS[case]
    return [mw.shard_tensor(x, mesh, rows) for x in both]


def gradients(style: str, case: str | None) -> dict[str, Tensor]:
    """Return the losses and all gradients; also the gradients of the router's losses alone."""
    model = Mixture(style) if case is None else laid(Mixture(style), case)
    x, goal = batch(0, case)
    x.requires_grad_()
    out, told = model(x)
    found = {"out": out, "told": told}
    found |= {"told router": torch.autograd.grad(told, model.router.weight, retain_graph=True)[0]}
    (((out - goal) ** 2).mean() + told).backward()
    grads = {n: p.grad for n, p in (*model.named_parameters(), ("x", x)) if p.grad is not None}
    return {n: mw.unshard_dtensor(t).detach() for n, t in (found | grads).items()}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_has_the_numbers_of_one_device(style: str, case: str) -> None:
    """Experts, the router's losses and their gradients, and the shared expert."""
    goal = gradients(style, None)
    for found in mw.simulate(gradients, LAYOUTS[case][0].size, style, case):
        assert found.keys() == goal.keys()
        torch.testing.assert_close(found, goal, rtol=1e-4, atol=1e-5)


class Trained(Mixture):
    """The mixture, whose result is its loss."""

    def forward(self, x: Tensor, goal: Tensor) -> Tensor:
        out, told = super().forward(x)
        return ((out - goal) ** 2).mean() + told


def trained(style: str, case: str | None, static: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    model = Trained(style)
    model = model if case is None else laid(model, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    step: Any = mw.to_static(model, None, None, optimizer) if static else model
    losses: list[float] = []
    for seed in range(3):
        loss = step(*batch(seed, case))
        losses.append(loss.item())
        if not static:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, {n: mw.unshard_dtensor(p.detach()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize(
    ("style", "case"),
    [
        ("grouped", "dp × ep"),
        ("grouped", "ep × tp"),
        ("dispatched", "dp × ep"),
        ("dispatched", "ep × tp"),
        ("batched", "ep"),
        *[("bounded", case) for case in ("dp", "ep, tokens whole", "dp × ep", "ep × tp")],
    ],
)
def test_steps_are_those_of_one_device(style: str, case: str, static: bool) -> None:
    goal = trained(style, None)
    for found in mw.simulate(trained, LAYOUTS[case][0].size, style, case, static):
        torch.testing.assert_close(found, goal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", ["dispatched", "bounded"])
def test_sizes_may_change(style: str) -> None:
    """One program takes all batches but the first."""

    class Alone(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    def go(case: str | None) -> list[Tensor]:
        model = Alone(style) if case is None else laid(Alone(style), case)
        step: Any = model if case is None else mw.to_static(model).eval()
        given = [torch.randn(n, DIM, generator=torch.Generator().manual_seed(n)) for n in (12, 6, 15, 9)]
        if case is not None:
            mesh, rows, _, _ = LAYOUTS[case]
            given = [mw.shard_tensor(x, mesh, rows) for x in given]
        found = [mw.unshard_dtensor(step(x).detach()) for x in given]
        assert case is None or step.recordings == 2
        return found

    for found in mw.simulate(go, 3, "ep"):
        torch.testing.assert_close(found, go(None), rtol=1e-4, atol=1e-5)


def communicated_tensors(style: str, case: str) -> list[tuple[str, Any]]:
    """Return the tensor of each collective of a forward and a backward pass, without the reduction of gradients."""
    model = laid(Mixture(style), case)
    x, _ = batch(0, case)
    with current_communicator().seen.record_calls() as calls:
        out, _ = model(x.requires_grad_())
        out.square().sum().backward()
    return [(call.kind, call.sends) for call in calls]


@pytest.mark.parametrize("case", ["ep", "ep, tokens whole", "dp × ep", "ep × tp"])
@pytest.mark.parametrize("style", ["grouped", "dispatched"])
def test_experts_stay_on_their_ranks(style: str, case: str) -> None:
    """No tensor of three dims is gathered or scattered: only matrices of experts have as many."""
    for calls in mw.simulate(communicated_tensors, LAYOUTS[case][0].size, style, case):
        assert calls
        assert not [c for c in calls if c[0] in ("all_gather", "reduce_scatter") and any(len(s) == 3 for s in c[1])]


class Chain(nn.Module):
    """Two mixtures, each on the ranks of its stage."""

    def __init__(self, style: str, homes: Sequence[mw.ProcessMesh] = ()) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Mixture(style) for _ in range(2))
        self.homes = homes
        for part, home in zip(self.parts, homes, strict=False):
            for name in ("up", "down"):
                setattr(part, name, mw.shard_tensor(getattr(part, name), home, [ROWS]))
            mw.shard_layer(part, home)

    def forward(self, x: Tensor) -> Tensor:
        for n, part in enumerate(self.parts):
            x, _ = part(mw.reshard(x, self.homes[n], [ROWS]) if self.homes else x)
        return x


def piped(style: str, how: str) -> tuple[list[float], dict[str, Tensor]]:
    homes = [] if how == "alone" else [mw.ProcessMesh([0, 1], ["ep"]), mw.ProcessMesh([2, 3], ["ep"])]
    model = Chain(style, homes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(out: Tensor, goal: Tensor) -> Tensor:
        return ((out - (mw.reshard(goal, homes[1], [ROWS]) if homes else goal)) ** 2).mean()

    options = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2})
    step: Any = mw.to_static(model, None, loss_of, optimizer, options) if how == "static" else None
    losses: list[float] = []
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        x, goal = torch.randn(12, DIM, generator=g), torch.randn(12, DIM, generator=g)
        if step is not None:
            losses.append(step(x, goal).item())
            continue
        loss = loss_of(model(x), goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: mw.unshard_dtensor(p.detach()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["eager", "static"])
@pytest.mark.parametrize("style", ["grouped", "dispatched"])
def test_experts_in_a_pipeline(style: str, how: str) -> None:
    goal = piped(style, "alone")
    for found in mw.simulate(piped, 4, style, how):
        torch.testing.assert_close(found[0], goal[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], goal[1], rtol=1e-4, atol=1e-5)


GOLDEN = {
    "gather": [867462, 867462, 867462, 867462],
    "sums": [351366, 351366, 351366, 351366],
    "travel": [27910, 29958, 35078, 36102],
    "places": [94086, 94086, 94086, 94086],
}
"""Bytes that each of four ranks receives in a step of 64 tokens, by method."""


@pytest.mark.parametrize("way", figure.WAYS)
def test_bytes_of_a_step_equal_the_stored_ones(way: str) -> None:
    assert figure.received(way, 64) == GOLDEN[way]
