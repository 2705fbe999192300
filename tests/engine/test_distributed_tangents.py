"""A plain tensor with a tangent keeps it when it is distributed: by hand, as an input, or to another stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import meshwright as mw

LINE = mw.ProcessMesh([0, 1], ["dp"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def parallel(zero: int = 0) -> nn.Module:
    net = model()
    mw.parallelize(net, torch.optim.SGD(net.parameters()), LINE, mw.Parallelism(zero=zero))
    return net


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dp": parallel,
    "zero": lambda: parallel(3),
    "pp": lambda: mw.split_pipeline(model(), mw.ProcessMesh([0, 1], ["pp"]), at=["2"]),
}


def tangent_and_gradients(net: nn.Module, backward: bool) -> list[Tensor]:
    """Return the tangent of the output and, with `backward`, the gradients of its square."""
    x, v = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(2, 0, 24).view(6, 4)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, v))).tangent
        if backward:
            tangent.square().sum().backward()
        found = [tangent.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
        return [mw.unshard_dtensor(t) if isinstance(t, mw.DistTensor) else t for t in found]


@pytest.mark.parametrize("kind", KINDS)
def test_tangents_are_those_of_one_device(kind: str) -> None:
    backward = kind != "pp"
    one = tangent_and_gradients(model(), backward)
    for found in mw.simulate(lambda: tangent_and_gradients(KINDS[kind](), backward), 2):
        torch.testing.assert_close(found, one)


def test_a_backward_pass_through_a_tangent_of_another_stage_is_no_wrong_number() -> None:
    with pytest.raises(mw.MeshwrightError):
        mw.simulate(lambda: tangent_and_gradients(KINDS["pp"](), True), 2)


def test_a_tangent_inside_jvp_is_not_lost() -> None:
    def act() -> None:
        torch.func.jvp(lambda x: mw.shard_tensor(x, LINE, [mw.Shard(0)]) * 3, (torch.ones(4),), (torch.ones(4),))

    with pytest.raises(mw.MeshwrightError, match="inside a transform"):
        mw.simulate(act, 2)
