"""Experts: values and gradients of one device, in all layouts of tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw
from meshwright.comm import current_communicator

Tensors = list[Tensor]
R, ROWS, COLUMNS, DEEP = mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Shard(2)
LINE = mw.ProcessMesh([0, 1, 2], ["ep"])
GRID = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"])
INNER = mw.ProcessMesh([[0, 1], [2, 3]], ["ep", "tp"])
CUBE = mw.ProcessMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["dp", "ep", "tp"])
EXPERTS, DIM, HIDDEN, CHOICES = 5, 8, 12, 2


def feed_forward(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


def given(tokens: int = 13, experts: int = EXPERTS) -> Tensors:
    """Return tokens, a router's choices for them, and weights of experts."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(tokens, experts, generator=g)
    up, down = (torch.randn(experts, *shape, generator=g) / 3 for shape in ((DIM, HIDDEN), (HIDDEN, DIM)))
    return [torch.randn(tokens, DIM, generator=g), scores, up, down]


def run(given: Sequence[Tensor], capacity: int | None = None, experts: Any = feed_forward) -> Tensors:
    """Return the result, and the gradients of all its inputs."""
    given = [x.detach().requires_grad_() for x in given]
    x, scores, *parameters = given
    weights, indices = scores.softmax(-1).topk(CHOICES)
    out = mw.dispatch_experts(x, indices, weights, experts, parameters, capacity=capacity)
    (out.square() * torch.arange(1, DIM + 1)).sum().backward()
    return [mw.unshard_dtensor(t) for t in (out.detach(), *(t.grad for t in given if t.grad is not None))]


def laid(tensors: Tensors, mesh: mw.ProcessMesh, *places: Sequence[mw.Placement]) -> Tensors:
    return [mw.shard_tensor(x, mesh, p) for x, p in zip(tensors, places, strict=True)]


LAYOUTS: dict[str, tuple[mw.ProcessMesh, tuple[list[mw.Placement], ...]]] = {
    "tokens and experts cut": (LINE, ([ROWS], [ROWS], [ROWS], [ROWS])),
    "tokens whole": (LINE, ([R], [R], [ROWS], [ROWS])),
    "features cut": (LINE, ([COLUMNS], [R], [ROWS], [ROWS])),
    "experts whole": (LINE, ([ROWS], [ROWS], [R], [R])),
    "experts cut inside": (LINE, ([ROWS], [ROWS], [DEEP], [COLUMNS])),
    "dp": (GRID, ([ROWS, R], [ROWS, R], [R, ROWS], [R, ROWS])),
    "dp and ep": (GRID, ([ROWS, ROWS], [ROWS, ROWS], [R, ROWS], [R, ROWS])),
    "experts over both": (GRID, ([ROWS, R], [ROWS, R], [ROWS, ROWS], [ROWS, ROWS])),
    "ep and tp": (INNER, ([ROWS, R], [ROWS, R], [ROWS, DEEP], [ROWS, COLUMNS])),
    "ep and tp, features cut": (INNER, ([ROWS, COLUMNS], [ROWS, R], [ROWS, DEEP], [ROWS, COLUMNS])),
    "ep and tp, tokens whole": (INNER, ([R, R], [R, R], [ROWS, DEEP], [ROWS, COLUMNS])),
    "dp, ep and tp": (CUBE, ([ROWS, ROWS, R], [ROWS, ROWS, R], [R, ROWS, DEEP], [R, ROWS, COLUMNS])),
}


@pytest.mark.parametrize("capacity", [None, 4], ids=["dropless", "capacity"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_dispatch_has_the_numbers_of_one_device(case: str, capacity: int | None) -> None:
    mesh, places = LAYOUTS[case]
    for tokens in (13, 2):
        goal = run(given(tokens), capacity)
        for found in mw.simulate(lambda n: run(laid(given(n), mesh, *places), capacity), mesh.size, tokens):
            torch.testing.assert_close(found, goal, rtol=1e-4, atol=1e-5)


def test_a_batch_sharded_along_rows_and_sequence() -> None:
    """No rank holds the rows in one piece."""
    mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["ep", "cp"])
    for capacity in (None, 4):

        def go(on_mesh: bool, capacity: int | None = capacity) -> Tensors:
            x, scores, up, down = given(12)
            x, scores = x.unflatten(0, (2, 6)), scores.unflatten(0, (2, 6))
            both, whole = [ROWS, COLUMNS], [ROWS]
            parts = laid([x, scores, up, down], mesh, both, both, whole, whole) if on_mesh else [x, scores, up, down]
            return run(parts, capacity)

        for found in mw.simulate(go, 4, True):
            torch.testing.assert_close(found, go(False), rtol=1e-4, atol=1e-5)


def test_indices_without_an_expert_add_nothing() -> None:
    def go(places: Any) -> Tensor:
        x, _, *parameters = given()
        indices = torch.arange(26).reshape(13, 2) % (EXPERTS + 2) - 1
        tensors = [x, indices, torch.ones(13, 2), *parameters]
        x, indices, weights, *parameters = laid(tensors, LINE, *places) if places else tensors
        return mw.unshard_dtensor(mw.dispatch_experts(x, indices, weights, feed_forward, parameters, capacity=3))

    for found in mw.simulate(go, 3, [[ROWS]] * 5):
        torch.testing.assert_close(found, go(None))


APART = {
    "experts on other ranks": (mw.ProcessMesh([0, 1], ["dp"]), mw.ProcessMesh([2, 3], ["ep"])),
    "experts on some of the ranks": (mw.ProcessMesh([0, 1, 2, 3], ["dp"]), mw.ProcessMesh([1, 3], ["ep"])),
    "experts on more ranks": (mw.ProcessMesh([0, 1], ["dp"]), mw.ProcessMesh([0, 1, 2, 3], ["ep"])),
    "a rank without tokens and experts": (mw.ProcessMesh([0, 1], ["ep"]), mw.ProcessMesh([0, 1], ["ep"])),
}


@pytest.mark.parametrize("case", APART)
def test_experts_may_be_on_a_mesh_of_their_own(case: str) -> None:
    here, there = APART[case]
    goal = run(given())

    def go() -> Tensors:
        x, scores, up, down = given()
        return run([*laid([x, scores], here, [ROWS], [ROWS]), *laid([up, down], there, [ROWS], [ROWS])])

    for found in mw.simulate(go, 4):
        torch.testing.assert_close(found, goal, rtol=1e-4, atol=1e-5)


def test_gradients_have_gradients() -> None:
    def products(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
        begins = [0, *ends.tolist()]
        made = [rows[a:b] @ u.tanh() @ d for a, b, u, d in zip(begins, ends.tolist(), up, down, strict=False)]
        return torch.cat([*made, rows[begins[-1] :]])

    def go(on_mesh: bool) -> Tensors:
        parts = laid(given(), LINE, [ROWS], [ROWS], [ROWS], [ROWS]) if on_mesh else given()
        x, scores, *parameters = (t.requires_grad_() for t in parts)
        weights, indices = scores.softmax(-1).topk(CHOICES)
        out = mw.dispatch_experts(x, indices, weights, products, parameters)
        first = torch.autograd.grad(out.square().sum(), [x, *parameters], create_graph=True)
        return [mw.unshard_dtensor(g) for g in torch.autograd.grad(sum(g.square().sum() for g in first), parameters)]

    for found in mw.simulate(go, 3, True):
        torch.testing.assert_close(found, go(False), rtol=1e-4, atol=1e-4)


def test_only_rows_and_counts_are_sent() -> None:
    """Rows for other ranks, there and back, in both passes; their numbers once; no weights of experts."""

    def go() -> tuple[int, dict[str, int], int]:
        x, scores, up, down = laid(given(12, 6), LINE, [ROWS], [ROWS], [ROWS], [ROWS])
        weights, indices = scores.softmax(-1).topk(CHOICES)
        seen = current_communicator().seen
        x.requires_grad_()
        out = mw.dispatch_experts(x, indices, weights, feed_forward, [up.requires_grad_(), down.requires_grad_()])
        forward = seen.total_received
        out.backward(torch.ones_like(out))
        return forward, dict(seen.calls), seen.total_received - forward

    holder = given(12, 6)[1].softmax(-1).topk(CHOICES).indices // 2
    source = torch.arange(12).reshape(12, 1).expand(12, CHOICES) // 4
    for rank, (forward, calls, backward) in enumerate(mw.simulate(go, 3)):
        away = int(((holder == rank) != (source == rank)).sum())  # sent here, or sent back
        assert calls == {"all_gather": 1, "all_to_all": 4}
        assert (forward, backward) == (away * DIM * 4 + 2 * 6 * 8, away * DIM * 4)
