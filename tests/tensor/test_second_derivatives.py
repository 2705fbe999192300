"""Second derivatives are those of one device, also if a rank holds nothing, or only infinities or zeros."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright as mw

MESH = mw.ProcessMesh(range(3), ["x"])
VALUES = torch.arange(1.0, 19.0, dtype=torch.float64).reshape(3, 6) / 7
HOLES = VALUES.masked_fill(torch.arange(6) < 2, -inf)
ZEROS = VALUES.masked_fill(torch.arange(6) < 2, 0)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x[..., :2].exp())


PROGRAMS: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
    (lambda x: x.logsumexp(1), VALUES),
    (lambda x: x.logsumexp(1), HOLES),
    (lambda x: x.norm(dim=1), ZEROS),
    (lambda x: torch.linalg.vector_norm(x, 3, dim=1), ZEROS),
    (lambda x: torch.linalg.vector_norm(x, 2.5), VALUES),
    (lambda x: attention(x.reshape(1, 2, 3, 3)), VALUES),
]
NAMES = ["logsumexp", "logsumexp with -inf", "norm with zeros", "norm of order 3", "norm of order 2.5", "attention"]


def derivatives(program: Callable[[Tensor], Tensor], leaf: Tensor) -> list[Tensor]:
    leaf.requires_grad_()
    (first,) = torch.autograd.grad((program(leaf) ** 2).sum(), leaf, create_graph=True)
    finite = first.masked_fill(leaf.detach().isinf(), 0)
    (second,) = torch.autograd.grad((finite * finite).sum(), leaf)
    return [mw.unshard_dtensor(t) if isinstance(t, mw.DistTensor) else t.detach() for t in (first.detach(), second)]


@pytest.mark.parametrize("placement", [mw.Replicate(), mw.Shard(0), mw.Shard(1)], ids=str)
@pytest.mark.parametrize(("program", "value"), PROGRAMS, ids=NAMES)
def test_first_and_second_derivatives(program: Callable[[Tensor], Tensor], value: Tensor, placement: mw.Placement):
    with sdpa_kernel(SDPBackend.MATH):
        wanted = derivatives(program, value.clone())
        ranks = mw.simulate(lambda: derivatives(program, mw.shard_tensor(value, MESH, [placement]).detach()), 3)
    for found in ranks:
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_reshard_keeps_the_order_of_the_elements_in_memory():
    def program() -> list[tuple[int, ...]]:
        x = mw.shard_tensor(torch.ones(4, 6).t(), MESH, [mw.Shard(0)])
        other = mw.ProcessMesh([[0, 1, 2]], ["a", "b"])
        return [mw.reshard(x, MESH, [p]).stride() for p in (mw.Shard(1), mw.Replicate(), mw.Partial())] + [
            mw.reshard(x, other, [mw.Replicate(), mw.Shard(1)]).stride()
        ]

    assert mw.simulate(program, 3) == [[(1, 6)] * 4] * 3
