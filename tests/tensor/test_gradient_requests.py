"""Requests for gradients and tangents: by attribute, for a batch of seeds, in forward mode, on fewer ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import meshwright as mw

MESH = mw.ProcessMesh(range(2), ["x"])
VALUE = torch.arange(1.0, 13.0).reshape(4, 3)


def _leaf(mesh: mw.ProcessMesh = MESH) -> Tensor:
    return mw.shard_tensor(VALUE, mesh, [mw.Shard(0)]).detach().requires_grad_()


def test_repeated_reads_give_the_same_gradient_tensor() -> None:
    def program() -> tuple[bool, bool]:
        x = _leaf()
        (x * x).sum().backward()
        first = x.grad
        assert first is not None
        first.mul_(2)
        assert x.grad is not None
        return x.grad is first, torch.equal(mw.unshard_dtensor(x.grad), 4 * VALUE)

    assert mw.simulate(program, 2) == [(True, True)] * 2


def test_a_batch_of_seeds_has_the_gradients_of_one_device() -> None:
    seeds = torch.stack([torch.ones(4, 3), VALUE.sin(), VALUE.cos()])

    def gradients(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x * x, x, grad_outputs=seeds, is_grads_batched=True)
        return found

    wanted = gradients(VALUE.clone().requires_grad_())
    for found in mw.simulate(lambda: mw.unshard_dtensor(gradients(_leaf())), 2):
        torch.testing.assert_close(found, wanted)


def test_an_empty_batch_of_seeds_is_refused() -> None:
    def program() -> Any:
        x = _leaf()
        return torch.autograd.grad((x * x).sum(), x, is_grads_batched=True)

    with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        mw.simulate(program, 2)


def test_a_rank_outside_the_mesh_has_the_whole_gradient() -> None:
    def program() -> tuple[Any, Any]:
        x = _leaf(mw.ProcessMesh([0, 2], ["x"]))
        (x * x).sum().backward()
        assert x.grad is not None
        return x.grad.tolist(), tuple((x.grad * 2).to_local().shape)

    here, parts = zip(*mw.simulate(program, 3), strict=True)
    assert here == ((2 * VALUE).tolist(),) * 3
    assert parts[0] == parts[2] == (2, 3)


@pytest.mark.parametrize("placement", [mw.Shard(0), mw.Shard(1), mw.Replicate()], ids=str)
def test_a_tangent_in_another_layout_is_that_of_one_device(placement: mw.Placement) -> None:
    def tangent(x: Tensor, t: Tensor) -> Tensor:
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual((forward_ad.make_dual(x, t) * x).sin())
            assert out.tangent is not None
            return out.tangent.detach().clone()

    wanted = tangent(VALUE, VALUE.cos())

    def program() -> Tensor:
        return mw.unshard_dtensor(tangent(_leaf().detach(), mw.shard_tensor(VALUE.cos(), MESH, [placement])))

    for found in mw.simulate(program, 2):
        torch.testing.assert_close(found, wanted)
