"""A function inside a transform of torch.func may write to its arguments: the writes reach the tensors outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import meshwright as mw
from meshwright.tensor import OperationError

from .oracle import STYLES, Lay, LayOut, Program, Style, check, run

MESHES = {
    "one rank": Style((1,), (mw.Shard(0),)),
    "uneven": Style((4,), (mw.Shard(0),)),
    "columns": STYLES["columns"],
    "terms": STYLES["terms"],
    "whole": STYLES["whole"],
}
QUIET = pytest.mark.filterwarnings("ignore:.*on whole tensors")
WRITES: list[Program] = []


def writes(program: Program) -> Program:
    WRITES.append(program)
    return program


def matrix(lay: Lay, grad: bool = False) -> Tensor:
    return lay(torch.arange(1.0, 25).view(6, 4) / 7, grad=grad)


def zeros(lay: Lay) -> Tensor:
    return lay(torch.zeros(6, 4))


@writes
def _scaled_rows(lay: Lay) -> Any:
    x = matrix(lay)
    version = x._version
    vmap(lambda r: r.mul_(2))(x)
    return x, x._version > version


@writes
def _rows_copied_into_a_cache(lay: Lay) -> Any:
    cache = zeros(lay)
    return vmap(lambda r, k: k.copy_(r))(matrix(lay), cache), cache


@writes
def _chunks(lay: Lay) -> Any:
    cache = zeros(lay)
    vmap(lambda r, k: k.copy_(r), chunk_size=2)(matrix(lay), cache)
    return cache


@writes
def _one_tensor_twice(lay: Lay) -> Any:
    x = matrix(lay)

    def double(r: Tensor, k: Tensor) -> Tensor:
        k.mul_(2)
        return r + k

    return vmap(double)(x, x), x


@writes
def _a_view(lay: Lay) -> Any:
    x = zeros(lay)
    vmap(lambda r: r.add_(1))(x[1:4])
    vmap(lambda r: r.add_(2), in_dims=1)(x.t()[:, 1:])
    return x


@writes
def _forward_mode(lay: Lay) -> Any:
    x, t = matrix(lay), matrix(lay)
    return jvp(lambda q: q.mul_(2), (x,), (t,)), x, t


@writes
def _below_autograd(lay: Lay) -> Any:
    x = matrix(lay)

    def erase(z: Tensor) -> Tensor:
        z.data.zero_()
        return z.sum()

    return grad(erase)(x), x


@writes
def _nested(lay: Lay) -> Any:
    x, c = matrix(lay), zeros(lay)

    def loss(z: Tensor, c: Tensor) -> Tensor:
        return vmap(lambda r, k: r.sum() * k.add_(1).sum())(z, c).sum()

    return grad(loss)(x, c), x, c


@writes
def _pulled_back(lay: Lay) -> Any:
    b = zeros(lay)

    def square(z: Tensor, b: Tensor) -> Tensor:
        b.add_(z.detach())
        return z * z

    x = matrix(lay)
    out, pull = vjp(lambda z: z.data.mul_(2) * z, x)
    return out, pull(torch.ones(6, 4)), x, jacrev(square, argnums=0)(matrix(lay), b), b


@writes
def _with_a_gradient(lay: Lay) -> Any:
    x = matrix(lay, grad=True)
    y = x * 1
    vmap(lambda r: r.mul_(2))(y)
    y.square().sum().backward()
    return y, x.grad


@writes
def _running_statistics(lay: Lay) -> Any:
    norm = nn.BatchNorm1d(4)
    parameters = {name: lay(p.detach()) for name, p in norm.named_parameters()}
    buffers = {name: lay(b) for name, b in norm.named_buffers()}

    x = matrix(lay)

    def loss(p: Any, b: Any) -> Tensor:
        return functional_call(norm, (p, b), (x,)).pow(3).sum()

    return grad(loss)(parameters, buffers), buffers


@QUIET
@pytest.mark.parametrize("style", MESHES)
@pytest.mark.parametrize("program", WRITES)
def test_writes_reach_the_arguments(program: Program, style: str) -> None:
    check(program, MESHES[style], rtol=1e-4, atol=1e-5)


def captured(lay: Lay) -> Any:
    c = lay(torch.zeros(4))
    return vmap(lambda r: c.add_(1) + r)(matrix(lay))


def beside_a_view(lay: Lay) -> Any:
    x = matrix(lay)
    return vmap(lambda r, k: r.mul_(2) + k, in_dims=(0, None))(x, x[:, 1:].t()[1, :4])


def sharded_inside(lay: Lay) -> Any:
    return vmap(lambda r: lay(r) * 1)(torch.ones(6, 4))


@QUIET
@pytest.mark.parametrize("style", ["one rank", "uneven", "columns", "terms"])
@pytest.mark.parametrize("program", [captured, beside_a_view, sharded_inside])
def test_other_writes_are_refused(program: Callable[[Lay], Any], style: str) -> None:
    with pytest.raises(OperationError, match="fix: "):
        mw.simulate(run, MESHES[style].ranks, program, LayOut(MESHES[style]))


@QUIET
def test_a_tensor_is_sharded_inside_a_gradient() -> None:
    mesh = mw.ProcessMesh([0, 1], ["a"])

    def program() -> list[float]:
        x = mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)])
        return grad(lambda z: (z * mw.shard_tensor(torch.arange(4.0) / 2, mesh, [mw.Shard(0)])).sum())(x).tolist()

    assert mw.simulate(program, 2) == [[0.0, 0.5, 1.0, 1.5]] * 2


@QUIET
def test_vmap_draws_the_numbers_of_one_device_for_each_memory_order() -> None:
    mesh = mw.ProcessMesh([0, 1], ["a"])
    x = torch.zeros(4, 6).t()

    def draw(x: Tensor) -> list[Any]:
        torch.manual_seed(0)
        return vmap(torch.rand_like, randomness="different")(x).tolist()

    assert mw.simulate(lambda: draw(mw.shard_tensor(x, mesh, [mw.Shard(0)])), 2) == [draw(x)] * 2
