"""Functions of lists of tensors, called by hooks inside a backward pass: the same numbers as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["dp"])
LAYOUTS = [(mw.Replicate(), mw.Shard(0)), (mw.Shard(1), mw.Shard(0)), (mw.Shard(0), mw.Replicate())]
CALLS: dict[str, Callable[[list[Tensor], list[Tensor]], object]] = {
    "add_": torch._foreach_add_,
    "mul_": torch._foreach_mul_,
    "lerp_": lambda written, read: torch._foreach_lerp_(written, read, 0.25),
    "addcmul_": lambda written, read: torch._foreach_addcmul_(written, read, read, value=0.5),
    "add, copy_": lambda written, read: torch._foreach_copy_(written, torch._foreach_add(written, read)),
}


def after_backward(
    call: Callable[[list[Tensor], list[Tensor]], object], mark: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return a tensor that a hook has written to twice."""
    weight = mark(torch.ones(4, 2), 1).requires_grad_()
    written, read = mark(torch.arange(8.0).reshape(4, 2), 0), mark(torch.arange(8.0, 16.0).reshape(4, 2), 1)

    def hook(_: Tensor) -> None:
        with torch.no_grad():
            call([written], [read])
            call([written], [read])

    weight.register_post_accumulate_grad_hook(hook)
    (weight * 2).sum().backward()
    return written


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_lists_in_hooks_have_the_numbers_of_one_device(name: str, layouts: tuple[mw.Placement, ...]) -> None:
    def on_rank() -> Tensor:
        found = after_backward(CALLS[name], lambda x, at: mw.shard_tensor(x, MESH, [layouts[at]]))
        return mw.unshard_dtensor(found)

    expected = after_backward(CALLS[name], lambda x, _: x)
    for found in mw.simulate(on_rank, 2):
        assert torch.equal(found, expected)
