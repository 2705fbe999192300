"""Tables that a forward pass computes once and stores in a dict, an attribute, a global or a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from .static_oracle import step_of

TABLES: dict[int, Tensor] = {}


class Net(nn.Module):
    """A linear layer, and a mask that `mask` computes or looks up."""

    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept, self.one = nn.Linear(4, 4), dict[int, Any](), None

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,bjk->bik", self.mask(x), self.layer(x))


class InADict(Net):
    def mask(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            self.kept[n] = torch.tril(torch.ones(n, n))
        return self.kept[n]


class InATuple(Net):
    def mask(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            angles = torch.outer(torch.arange(n).float(), torch.linspace(1, 2, n))
            self.kept[n] = angles.cos(), angles.sin().to(x.dtype)
        cos, sin = self.kept[n]
        return cos + 2 * sin


class AsAnAttribute(Net):
    one: Any

    def mask(self, x: Tensor) -> Tensor:
        if self.one is None or len(self.one) != x.shape[1]:
            self.one = torch.full((x.shape[1], x.shape[1]), 0.5).cumsum(0)
        return self.one


class InAGlobal(Net):
    def mask(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in TABLES:
            TABLES[n] = torch.eye(n) * 2 + 1
        return TABLES[n]


class InABuffer(Net):
    def mask(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(x.shape[1], x.shape[1]).triu(), persistent=False)
        return self.table  # pyright: ignore[reportReturnType]


class OfABuffer(Net):
    """Tables of angles, computed from a buffer of frequencies."""

    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 1.0 / torch.arange(1, 7).float())

    def mask(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.one is None or len(self.one[0]) != n:
            angles = torch.outer(torch.arange(n, device=x.device, dtype=self.rates.dtype), self.rates[:n])
            self.one = angles.cos(), angles.sin()
        return self.one[0] - self.one[1]


class OfAShape(Net):
    def mask(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            self.kept[n] = torch.ones_like(x[0]).new_ones(n, n).tril()
        return self.kept[n]


LENGTHS = (3, 3, 5, 3, 5, 4)


def _trained(kind: type[Net], ranks: int, lengths: tuple[int, ...], written: bool = False) -> list[float]:
    TABLES.clear()
    torch.manual_seed(0)
    net = kind()
    mesh = mw.ProcessMesh(list(range(ranks)), ["dp"]) if ranks else None
    if mesh is not None:
        mw.shard_layer(net, mesh)
    step = step_of(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.01), static=ranks > 0)
    found: list[float] = []
    for at, n in enumerate(lengths):
        if written and at == 2:
            net.kept[n].mul_(2)
        batch = torch.randn(4, n, 4), torch.randn(4, n, 4)
        if mesh is not None:
            batch = tuple(mw.shard_tensor(x, mesh, [mw.Shard(0)]) for x in batch)
        found.append(step(*batch).item())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [InADict, InATuple, AsAnAttribute, InAGlobal, OfABuffer, OfAShape])
def test_a_table_is_made_once_for_each_length(kind: type[Net], ranks: int) -> None:
    wanted = _trained(kind, 0, LENGTHS)
    for found in mw.simulate(_trained, ranks, kind, ranks, LENGTHS):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_table_may_be_a_buffer() -> None:
    wanted = _trained(InABuffer, 0, (3, 3, 3))
    for found in mw.simulate(_trained, 2, InABuffer, 2, (3, 3, 3)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_stored_program_reads_the_current_tables(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROGRAMS", str(tmp_path))
    wanted = _trained(InADict, 0, (3, 3, 3), written=True)
    for _ in range(2):  # the second model loads the first one's program
        (found,) = mw.simulate(_trained, 1, InADict, 1, (3, 3, 3), written=True)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class FirstCallApart(Net):
    """A mask that the first call computes differently from later calls."""

    def mask(self, x: Tensor) -> Tensor:
        first, self.one = self.one is None, True
        return torch.eye(3) * (2 if first else 1)


class OfTheBatch(Net):
    def mask(self, x: Tensor) -> Tensor:
        if self.one is None:
            self.one = x.detach().std()
        return torch.eye(3) * self.one


@pytest.mark.parametrize("kind", [FirstCallApart, OfTheBatch])
def test_a_first_call_with_another_result_is_refused(kind: type[Net]) -> None:
    def go() -> Any:
        net = kind()
        with pytest.raises(mw.errors.CaptureError, match=r"one was (None|'another')|left in one"):
            mw.to_static(net, None, F.mse_loss, torch.optim.SGD(net.parameters()))(
                torch.randn(4, 3, 4), torch.randn(4, 3, 4)
            )
        return net.one

    assert mw.simulate(go, 1) == [None]


def test_programs_for_variable_lengths_count_once() -> None:
    lengths = (*range(2, 9), *range(2, 9))

    def go() -> list[float]:
        strategy = mw.Strategy(max_programs=len(set(lengths)))
        torch.manual_seed(0)
        net = InADict()
        step = mw.to_static(net, None, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.01), strategy)
        return [step(torch.randn(4, n, 4), torch.randn(4, n, 4)).item() for n in lengths]

    torch.testing.assert_close(mw.simulate(go, 1), [_trained(InADict, 0, lengths)], rtol=1e-5, atol=1e-6)


class Outer(nn.Module):
    """A module that reads a tensor's value, so that the module in it is a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InADict()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * 2 if y.mean().item() > 100 else y


def test_a_piece_may_store_tables() -> None:
    lengths = (3, 5, 3, 5, 4, 3)

    def go(static: bool) -> list[float]:
        torch.manual_seed(0)
        net = Outer()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        strategy = mw.Strategy(full_graph=False)
        step: Any = mw.to_static(net, None, F.mse_loss, optimizer, strategy) if static else None
        step = step or step_of(net, F.mse_loss, optimizer, static=False)
        return [step(torch.randn(4, n, 4), torch.randn(4, n, 4)).item() for n in lengths]

    torch.testing.assert_close(mw.simulate(go, 1, True), [go(False)], rtol=1e-5, atol=1e-6)
