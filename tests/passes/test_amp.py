"""Mixed precision: level O1 is autocast to the bit; level O2 keeps master weights, norms and losses in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import RewriteError, count_ops
from meshwright.models import Llama, mark
from meshwright.passes import Amp

from .steps import SMALL as TWO

SMALL = replace(TWO, layers=1)
TOKENS = torch.randint(0, SMALL.vocab, (8, 9), generator=torch.Generator().manual_seed(1))
BATCH = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()


def llama(shape: tuple[int, int, int]) -> nn.Module:
    m = Llama(SMALL, 0)
    mark(m, mw.ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape), ["pp", "dp", "tp"]))
    return m


class Net(nn.Module):
    """A model with convolution, norm, matrix and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.conv(x).mean((2, 3))).softmax(-1)
        return F.mse_loss(self.last(x).sigmoid(), y)


def net(shape: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net()


IMAGES = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(2)), torch.zeros(4, 3)


def trained(make: Any, shape: tuple[int, int, int], batch: Any, *passes: Any, eager: bool = False) -> list[Any]:
    """Return for each rank: the losses of two steps, the parameters, and the program."""

    def rank() -> Any:
        m = make(shape)
        opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        if not eager:
            dist = mw.to_static(m, None, None, opt, strategy=mw.Strategy(passes=passes))
            losses = [local(dist(*batch)) for _ in range(2)]
            return losses, [local(p) for p in m.parameters()], dist.program
        losses: list[Tensor] = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = m(*batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(torch.tensor(loss.item()))
        return losses, [local(p) for p in m.parameters()], None

    return mw.simulate(rank, int(np.prod(shape)))


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, mw.DistTensor) else x).detach().clone()


@pytest.mark.parametrize(
    ("make", "shape", "batch"), [(llama, (1, 1, 1), BATCH), (llama, (1, 1, 2), BATCH), (net, (1, 1, 1), IMAGES)]
)
def test_level_one_is_autocast(make: Any, shape: tuple[int, int, int], batch: Any) -> None:
    eager, static = trained(make, shape, batch, eager=True), trained(make, shape, batch, Amp())
    for (losses, parameters, _), (others, static_parameters, _) in zip(eager, static, strict=True):
        assert [x.item() for x in losses] == [x.item() for x in others]
        assert all(map(torch.equal, parameters, static_parameters))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_master_weights_and_their_gradients_stay_in_single_precision(level: Any) -> None:
    ((losses, parameters, program),) = trained(llama, (1, 1, 1), BATCH, Amp(level=level))
    assert all(p.dtype == torch.float32 for p in parameters)
    assert all(v.dtype == torch.float32 for _, v in program.writes)
    matrices = [n for n in program.nodes if "mm" in str(n.op)]
    assert {v.dtype for n in matrices for v in n.ins if v.is_tensor} == {torch.bfloat16}
    (plain, _, _), *_ = trained(llama, (1, 1, 1), BATCH)
    torch.testing.assert_close([x.float() for x in losses], plain, rtol=0.02, atol=0.02)


def test_level_two_runs_norms_and_losses_in_single_precision() -> None:
    ((losses, _, program),) = trained(net, (1, 1, 1), IMAGES, Amp(level="O2"))
    assert losses[0].dtype == torch.float32
    alone = [n for n in program.nodes if any(name in str(n.op) for name in ("layer_norm", "softmax", "mse_loss"))]
    assert alone
    assert {v.dtype for n in alone for v in n.ins if v.is_tensor} == {torch.float32}
    assert "aten.convolution.default" in count_ops(program.nodes)
    convolution = next(n for n in program.nodes if "convolution" in str(n.op))
    assert {v.dtype for v in convolution.ins} == {torch.bfloat16}


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"level": "O3"}])
def test_impossible_options_are_refused(how: Any) -> None:
    with pytest.raises(RewriteError):
        Amp(**how)
