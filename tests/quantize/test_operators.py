"""Operators of torch for quantized training: sharded without a gather, equal to one device in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator

PAIR = mw.ProcessMesh([0, 1], ["tp"])
SCALES, ZEROS = (1 + torch.arange(6.0)) / 20, torch.tensor([0, 1, -2, 3, 0, 1], dtype=torch.int32)

FAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "one scale": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 1, -8, 7),
    "one scale, a tensor": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.1), torch.tensor(1, dtype=torch.int32), -8, 7
    ),
    "channels": lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS, 1, -8, 7),
    "channels, with a mask": lambda x: torch.ops.aten.fake_quantize_per_channel_affine_cachemask(
        x, SCALES, ZEROS, 1, -8, 7
    )[0],
    "learned": lambda x: getattr(torch, "_fake_quantize_learnable_per_channel_affine")(  # noqa: B009
        x, SCALES, ZEROS.float(), 1, -8, 7
    ),
}


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x.requires_grad_()
    y = function(x)
    (y * torch.arange(24.0).view(4, 6)).sum().backward()
    assert x.grad is not None
    return mw.unshard_dtensor(y.detach()), mw.unshard_dtensor(x.grad)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FAKE)
def test_fake_quantization_is_elementwise(name: str, dim: int) -> None:
    numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    value, gradient = with_gradient(FAKE[name], numbers.clone())

    def program() -> tuple[int, tuple[Tensor, Tensor]]:
        x = mw.shard_tensor(numbers, PAIR, [mw.Shard(dim)])
        before = current_communicator().seen.total_received
        FAKE[name](x)
        return current_communicator().seen.total_received - before, with_gradient(FAKE[name], x)

    for received, found in mw.simulate(program, 2):
        assert received == 0
        torch.testing.assert_close(found, (value, gradient), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("channels", [False, True])
def test_learned_scales_get_the_gradients_of_one_device(channels: bool, dim: int) -> None:
    numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    name = f"_fake_quantize_learnable_per_{'channel' if channels else 'tensor'}_affine"
    function: Callable[..., Tensor] = getattr(torch, name)
    starts = (SCALES, ZEROS.float()) if channels else (torch.tensor([0.1]), torch.tensor([1.0]))

    def gradients(x: Tensor) -> list[Tensor]:
        scale, zero = (t.clone().requires_grad_() for t in starts)
        (function(x, scale, zero, *([1] if channels else []), -8, 7) * torch.arange(24.0).view(4, 6)).sum().backward()
        assert scale.grad is not None
        assert zero.grad is not None
        return [mw.unshard_dtensor(t) for t in (scale.grad, zero.grad)]

    expected = gradients(numbers)
    for found in mw.simulate(lambda: gradients(mw.shard_tensor(numbers, PAIR, [mw.Shard(dim)])), 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_float8_product_keeps_the_columns_of_its_weight(dim: int, rowwise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-2, 3, s, generator=generator).to(torch.float8_e4m3fn) for s in ((4, 64), (32, 64)))
    scales = (torch.full((4, 1), 0.5), torch.full((1, 32), 0.25)) if rowwise else (torch.tensor(0.5), torch.tensor(2.0))
    dtype = torch.bfloat16 if rowwise else torch.float32
    product: Any = getattr(torch, "_scaled_mm")  # noqa: B009 - not in torch's stubs
    whole = product(x, w.t(), *scales, out_dtype=dtype)

    def program() -> tuple[int, Any, Tensor]:
        sharded = mw.shard_tensor(w, PAIR, [mw.Shard(dim)])
        before = current_communicator().seen.total_received
        found = product(x, sharded.t(), *scales, out_dtype=dtype)
        received = current_communicator().seen.total_received - before
        part: Any = mw.reshard(sharded.t(), PAIR, [mw.Replicate()])
        assert part.to_local().stride() == (1, 64)
        return received, found.placements[0], mw.unshard_dtensor(found)

    for received, placement, found in mw.simulate(program, 2):
        assert received == 0
        assert placement == (mw.Partial() if dim else mw.Shard(1))
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
