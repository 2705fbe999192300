"""Operators without a rule that torch makes of smaller ones: the smaller ones run, on parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.tensor.conversion.whole_call import RAN_WHOLE

torch.manual_seed(0)
CELLS = {kind.__name__: kind(6, 8).double() for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)}
LSTM = nn.LSTM(6, 8, 2, dropout=0.5, batch_first=True).double()

CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    **{name: (lambda x, cell=cell: cell(x), (5, 6)) for name, cell in CELLS.items() if name != "LSTMCell"},
    "LSTMCell": (lambda x: CELLS["LSTMCell"](x)[0], (5, 6)),
    "lstm with dropout": (lambda x: LSTM(x)[0], (5, 3, 6)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, True), (5, 6)),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.3, True), (5, 6, 2)),
    "trapezoid": (lambda x: torch.trapezoid(x, dx=0.5), (5, 6)),
    "cumulative_trapezoid": (lambda x: torch.cumulative_trapezoid(x, dim=0), (5, 6)),
    "triplet": (lambda x: F.triplet_margin_loss(x, x.flip(0), x.square()), (5, 6)),
    "cosine": (lambda x: F.cosine_embedding_loss(x, x.flip(0), torch.tensor([1, -1, 1, 1, -1])), (5, 6)),
    "matrix_norm": (torch.linalg.matrix_norm, (5, 3, 3)),
    "norm of one": (lambda x: torch.linalg.norm(x, 1, dim=(-2, -1)), (5, 3, 3)),
    "diag": (lambda x: x.diag(), (5, 5)),
    "diagflat": (lambda x: x.diagflat(), (5,)),
    "hsplit": (lambda x: x.hsplit(2)[1], (5, 6)),
    "meshgrid": (lambda x: torch.meshgrid(x, x * 2, indexing="ij")[1], (5,)),
    "cartesian_prod": (lambda x: torch.cartesian_prod(x, x * 2), (5,)),
    "sum_to_size": (lambda x: x.sum_to_size(1, 6), (5, 6)),
    "gradient": (lambda x: torch.gradient(x)[0], (5, 6)),
    "diff with more": (lambda x: x.diff(prepend=x[:, :1]), (5, 6)),
    "quantiles": (lambda x: x.quantile(torch.tensor([0.3, 0.5], dtype=torch.float64), 1), (5, 6)),
    "einsum of a diagonal": (lambda x: torch.einsum("bii->b", x), (5, 3, 3)),
    "hfft2": (torch.fft.hfft2, (5, 6, 4)),
    "instance_norm": (lambda x: F.instance_norm(x, torch.zeros(3).double(), torch.ones(3).double()), (5, 3, 6)),
    "pad_sequence": (lambda x: nn.utils.rnn.pad_sequence([x, x[:2]]), (5, 6)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3), (5, 6)),
    "column_stack": (lambda x: torch.column_stack((x[:, 0], x)), (5, 6)),
    "hstack": (lambda x: torch.hstack((x, x[:, :2])), (5, 6)),
    "vstack": (lambda x: torch.vstack((x[0], x[1])), (5, 6)),
    "dstack": (lambda x: torch.dstack((x, x * 2)), (5, 6)),
    "atleast_3d": (torch.atleast_3d, (5, 6)),
    "inner": (lambda x: torch.inner(x, x.square()), (5, 6)),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([0, 1], [0, 1])), (5, 6, 2)),
    "multi_dot": (lambda x: torch.linalg.multi_dot((x, x.t(), x)), (5, 6)),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x.square()), (5, 6)),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x.square()), (5, 6)),
    "pairwise_distance": (lambda x: F.pairwise_distance(x, x.square()), (5, 6)),
    "quantile": (lambda x: x.quantile(0.3, 1), (5, 6)),
    "msort": (torch.msort, (5, 6)),
    "diff": (lambda x: x.diff(2, 0), (5, 6)),
    "tensor_split": (lambda x: x.tensor_split(4, 1)[1], (5, 6)),
    "fliplr": (torch.fliplr, (5, 6)),
    "fftshift": (torch.fft.fftshift, (5, 6)),
    "take_along_dim": (lambda x: x.take_along_dim(x.argsort(1), 1), (5, 6)),
}


def outcome(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value, and the gradient of a weighted sum of it."""
    torch.manual_seed(3)
    out = fn(x)
    (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_composite_operator_runs_on_parts(name: str, ranks: int) -> None:
    fn, shape = CASES[name]
    x = torch.randn(shape, dtype=torch.float64)
    wanted = outcome(fn, x.clone().requires_grad_())

    def rank(dim: int) -> Any:
        laid = mw.shard_tensor(x.clone(), mw.init_mesh(x=ranks), [mw.Shard(dim)]).requires_grad_()
        return [mw.unshard_dtensor(t) for t in outcome(fn, laid)]

    for dim in range(len(shape)):
        RAN_WHOLE.clear()
        for found in mw.simulate(lambda dim=dim: rank(dim), ranks):
            torch.testing.assert_close(found, list(wanted))
        assert not RAN_WHOLE


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_composite_of_a_tensor_in_another_memory_order(ranks: int) -> None:
    """torch makes the operand contiguous where it is not, which no capture of a contiguous one shows."""
    x = torch.randn(6, 3, 5, dtype=torch.float64)

    def go(x: Tensor) -> Tensor:
        return F.instance_norm(x.transpose(0, 2), torch.zeros(3).double(), torch.ones(3).double())

    wanted = go(x)

    def rank() -> Tensor:
        return mw.unshard_dtensor(go(mw.shard_tensor(x.clone(), mw.init_mesh(x=ranks), [mw.Shard(0)])))

    for found in mw.simulate(rank, ranks):
        torch.testing.assert_close(found, wanted)
