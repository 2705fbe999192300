"""Operands for which a result has a gradient: on ranks outside a mesh the same as by torch's autograd on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import map_tensors, tensors_in
from meshwright.tensor.capture.gradient_paths import gradient_paths
from tests.spmd.samples import build, samples

FIRST, SECOND = mw.ProcessMesh([0], ["tp"]), mw.ProcessMesh([1], ["tp"])


def by_autograd(op: Any, args: Any, kwargs: Any) -> list[set[int]]:
    """Return for each result the operands for which torch's autograd has a gradient."""
    tensors = list(tensors_in((args, kwargs)))
    places = [n for n, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    found: list[list[bool]] = []
    for place in places:
        left = iter(range(len(tensors)))

        def given(t: Tensor, left: Any = left, place: int = place) -> Tensor:
            return t.detach().clone().requires_grad_().view_as(t) if next(left) == place else t.detach().clone()

        out = op(*map_tensors(given, args), **map_tensors(given, kwargs))
        found.append([t.requires_grad for t in tensors_in(out)])
    return [{n for n, behind in zip(places, found, strict=True) if behind[k]} for k in range(len(found[0]))]


def test_paths_of_all_samples_are_those_of_torch() -> None:
    wrong: list[str] = []
    known = 0
    for name, arguments in samples():
        sample = build(name, arguments)
        paths = gradient_paths(sample.op, sample.args, sample.kwargs)
        if paths is None:
            continue
        known += 1
        wanted = by_autograd(sample.op, sample.args, sample.kwargs)
        if [set(p) for p in paths] != wanted:
            wrong.append(f"{name}({arguments}): {paths}, not {wanted}")
    assert not wrong, "\n".join(wrong)
    assert known > 700


@pytest.mark.parametrize(
    "call",
    [torch.zeros_like, lambda x: x.new_ones(3, 4), lambda x: torch.ones(3, 4).expand_as(x), lambda x: x.detach() * 1],
    ids=["zeros_like", "new_ones", "expand_as", "detach"],
)
def test_values_without_a_gradient_are_sent_to_a_stage_without_one(call: Callable[[Tensor], Tensor]) -> None:
    def on_rank() -> tuple[Tensor, bool]:
        x = mw.shard_tensor(torch.ones(3, 4).requires_grad_(), FIRST, [])
        w = mw.shard_tensor(torch.ones(3, 4).requires_grad_(), SECOND, [])
        y = call(x)
        (mw.reshard(y, SECOND, []) * w).sum().backward()
        assert w.grad is not None
        return mw.unshard_dtensor(w.grad), y.requires_grad

    for grad, requires in mw.simulate(on_rank, 2):
        torch.testing.assert_close(grad, call(torch.ones(3, 4)))
        assert not requires


def test_the_hooks_of_the_caller_see_no_trial() -> None:
    """`torch.utils.checkpoint` counts the tensors that a call saves: the first run may save no more than the second."""

    def saved() -> list[int]:
        x = mw.shard_tensor(torch.rand(3, 3, requires_grad=True), FIRST, [])
        counts: list[int] = []
        for _ in range(2):
            seen: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
                (x * x.sin()).logsumexp(0)
            counts.append(len(seen))
        return counts

    for first, second in mw.simulate(saved, 2):
        assert first == second
