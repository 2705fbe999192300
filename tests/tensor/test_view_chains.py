"""A write to a view of a view reaches the base, in every memory order and layout."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from benchmarks import aliases

STEP = 1201


@pytest.mark.parametrize("start", range(3))
def test_a_chain_of_views_equals_that_of_one_device(start: int) -> None:
    """A sample of the chains of the benchmark `aliases`, with other chains in each layout."""
    programs = list(aliases.chains())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, layout in enumerate(aliases.LAYOUTS):
            sample = programs[(start * 401 + k * 79) % STEP :: STEP]
            found = aliases.sweep(sample, [layout])
            wrong = [f"{s.name}, {where}: {f.message}" for s, where, f in found if f and f.status != "refused"]
            assert not wrong, "\n".join(wrong)


VIEWS: dict[str, Any] = {
    "x[3:, 1]": lambda x: x[3:, 1],
    "x[2:][:, 1]": lambda x: x[2:][:, 1],
    "x.split(2)[1][:, 0]": lambda x: x.split(2)[1][:, 0],
    "x.chunk(2)[1].unbind(1)[2]": lambda x: x.chunk(2)[1].unbind(1)[2],
    "x.narrow(0, 3, 3).select(1, 1)": lambda x: x.narrow(0, 3, 3).select(1, 1),
    "x[3:].t()[1]": lambda x: x[3:].t()[1],
    "x.data[3:][:, 1]": lambda x: x.data[3:][:, 1],
    "x.view(2, 3, 4)[1][:, 1]": lambda x: x.view(2, 3, 4)[1][:, 1],
    "x[::2][:, 0]": lambda x: x[::2][:, 0],
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_to_a_view_of_a_view_of_a_transposed_tensor_is_not_lost(view: str, ranks: int) -> None:
    def program(x: Tensor) -> list[list[float]]:
        VIEWS[view](x).fill_(9.0)
        VIEWS[view](x).add_(1)
        VIEWS[view](x)[...] = VIEWS[view](x) * 2
        return x.tolist()

    def on_rank() -> list[list[float]]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        return program(mw.shard_tensor(torch.zeros(4, 6).t(), mesh, [mw.Shard(0)]))

    assert mw.simulate(on_rank, ranks) == [program(torch.zeros(4, 6).t())] * ranks


def on_three(program: Any) -> None:
    """Check that the program gives on each of three ranks the results of one device."""

    def on_rank() -> Any:
        x = mw.shard_tensor(torch.arange(12.0).view(6, 2), mw.ProcessMesh(range(3), ["x"]), [mw.Shard(0)])
        return program(x.requires_grad_())

    wanted = program(torch.arange(12.0).view(6, 2).requires_grad_())
    assert mw.simulate(on_rank, 3) == [wanted] * 3


def test_autograd_ignores_a_write_to_the_data_of_a_view() -> None:
    def program(x: Tensor) -> Any:
        y = x * 1
        y[1:3].data.fill_(7)
        y[3:].data[1:][:, 0].mul_(2)
        version = y._version
        y[2:][:, 0].detach().add_(1)
        (y * y).sum().backward()
        assert x.grad is not None
        return y.tolist(), x.grad.tolist(), version, y._version

    on_three(program)


def test_a_view_gets_writes_to_the_data_of_its_base() -> None:
    def program(x: Tensor) -> Any:
        y = x.detach()
        view, data = y[2:5], y.data
        data.sub_(2)
        for _ in range(100):
            y.data[2:3].add_(1)
        return view.tolist(), data[1:].tolist(), y._version

    on_three(program)


def test_a_view_keeps_its_memory_if_its_base_changes_memory() -> None:
    def program(x: Tensor) -> Any:
        x = x.detach()
        view, data = x[2:4], x[1:].data[1:][:2]
        x.data = torch.ones(6, 2)
        view.add_(1)
        data.mul_(2)
        inner = view[:, 1]
        view.data = torch.zeros(2, 2)
        inner.sub_(5)
        return x.tolist(), view.tolist(), data.tolist(), inner.tolist()

    on_three(program)


def test_torchs_refusal_of_a_view_is_the_same_on_every_rank() -> None:
    """The Python kernel of `view` accepts these strides, and a rank without elements accepts all strides."""

    def program() -> None:
        x = torch.zeros(4, 2, 3, 2).permute(3, 0, 1, 2)
        y = mw.shard_tensor(x, mw.ProcessMesh(range(3), ["x"]), [mw.Shard(1)]).unflatten(0, (2, -1))
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            y.view(-1, 3)
        assert y.sum().item() == 0

    mw.simulate(program, 3)
