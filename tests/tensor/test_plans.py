"""Cached plans and conversions: only equal calls use them again."""

from __future__ import annotations

import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor.core.dist_tensor import PLANS, signature

MESH = mw.ProcessMesh([0, 1], ["a"])


def test_sequences_that_compare_equal_are_different_signatures() -> None:
    sizes = [(1, 2), [1, 2], torch.Size((1, 2)), (True, 2), (1.0, 2), ((1, 2),)]
    keys = [signature(Tensor.view, (size,), None) for size in sizes]
    assert None not in keys
    assert len({*keys, signature(Tensor.view, (1, 2), None)}) == len(sizes) + 1


def test_a_float_that_changes_the_rule_makes_another_plan() -> None:
    plain = torch.tensor([3.0, 0.0, 4.0, 0.0])

    def on_rank() -> list[float]:
        x = mw.shard_tensor(plain, MESH, [mw.Shard(0)])
        return [torch.linalg.vector_norm(x, p).item() for p in (0.0, 2.0, 1.0)]

    assert mw.simulate(on_rank, 2) == [[2.0, 5.0, 7.0]] * 2


def test_a_tensor_that_later_requires_a_gradient_gets_it() -> None:
    def on_rank() -> Tensor:
        x = mw.shard_tensor(torch.ones(4), MESH, [])
        w = mw.shard_tensor(torch.arange(4.0), MESH, [mw.Shard(0)])
        (x * w).sum()
        x.requires_grad_()
        (x * w).sum().backward()
        return mw.unshard_dtensor(x.grad)

    assert all(g.tolist() == [0.0, 1.0, 2.0, 3.0] for g in mw.simulate(on_rank, 2))


def test_writes_through_data_are_read() -> None:
    def on_rank() -> list[float]:
        w = mw.shard_tensor(torch.nn.Parameter(torch.ones(4)), MESH, [mw.Shard(0)])
        found: list[float] = []
        with torch.no_grad():
            for _ in range(2):
                found.append((w.cumsum(0) * 1).sum().item())
                w.data.mul_(2)
        return found

    assert mw.simulate(on_rank, 2) == [[10.0, 20.0]] * 2


def test_a_rank_without_a_piece_of_a_tensor_without_elements() -> None:
    """torch pads a tensor of no pictures, but refuses one without rows."""

    def rank() -> tuple[int, ...]:
        x = mw.shard_tensor(torch.zeros(0, 3, 3), mw.init_mesh(x=4), [mw.Shard(1)])
        return tuple(torch.nn.functional.pad(x, (0, 1), mode="reflect").shape)

    assert mw.simulate(rank, 4) == [(0, 3, 4)] * 4


def test_a_mask_indexed_along_a_sharded_dim_stays_a_mask() -> None:
    """Ranks look their own rows up; a mask of numbers would index by them."""
    mask, at = torch.tensor([True, False, True, True, False]), torch.tensor([3, 0, 4])

    def found(mask: Tensor) -> list[Tensor]:
        return [mask[at], ~mask[at], torch.arange(3.0)[mask[at]], mask.gather(0, at), mask.index_select(0, at)]

    def rank() -> list[Tensor]:
        laid = mw.shard_tensor(mask.clone(), MESH, [mw.Shard(0)])
        return [mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x for x in found(laid)]

    for here in mw.simulate(rank, 2):
        torch.testing.assert_close(here, found(mask))


def updates(p: Tensor, g: Tensor, number: float) -> None:
    """Update a parameter as optimizers do, with numbers that change in every step."""
    p.add_(g, alpha=-number)
    p.mul_(1 - number)
    p.lerp_(g, number)
    p.addcmul_(g, g, value=number)
    p.addcdiv_(g, g.abs() + number, value=-number)
    p.copy_(torch.where(p > number, p * number, p / number).clamp(-number, number).pow(number))


def test_a_number_that_changes_every_step_makes_no_new_plan() -> None:
    layouts = [(mw.Shard(0), mw.Shard(0)), (mw.Shard(0), mw.Replicate()), (mw.Replicate(), mw.Shard(1))]

    def on_rank() -> list[int]:
        p, g = torch.ones(4, 4), torch.rand(4, 4)
        pairs = [(mw.shard_tensor(p, MESH, [a]), mw.shard_tensor(g, MESH, [b])) for a, b in layouts]
        counts: list[int] = []
        for step in range(6):
            for laid, update in pairs:
                updates(laid, update, 0.1 + 0.01 * step)
            counts.append(len(PLANS))
        return counts

    for counts in mw.simulate(on_rank, 2):
        assert counts[2] == counts[-1]


def test_a_plan_of_dropout_without_effect_is_not_used_for_other_numbers() -> None:
    """Without anything to drop, dropout returns its argument."""

    def on_rank() -> list[bool]:
        x = mw.shard_tensor(torch.ones(64), MESH, [mw.Shard(0)])
        drops = [torch.nn.functional.alpha_dropout, torch.nn.functional.feature_alpha_dropout]
        return [bool((drop(x.view(8, 8), p, True) == x.view(8, 8)).all()) for drop in drops for p in (0.0, 0.5, 0.0)]

    assert mw.simulate(on_rank, 2) == [[True, False, True] * 2] * 2


def test_the_default_dtype_is_part_of_a_plan_that_keeps_operators() -> None:
    def on_rank() -> torch.dtype:
        x = mw.shard_tensor(torch.arange(4), MESH, [mw.Shard(0)])
        return torch.result_type(x, 1.5)

    before = mw.simulate(on_rank, 2)
    torch.set_default_dtype(torch.float64)
    try:
        assert mw.simulate(on_rank, 2) == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)
    assert before == mw.simulate(on_rank, 2) == [torch.float32] * 2
