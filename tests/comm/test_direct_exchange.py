"""Collectives of small tensors over Gloo: one message to each rank, with the bits of simulated ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import _programs as programs

from meshwright.comm import launch, simulate
from meshwright.comm.torch_hooks import Backend
from meshwright.comm.transport import direct_exchange
from meshwright.comm.transport.direct_exchange import DirectExchange

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = str(Path(programs.__file__))
SIZE = 3


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("three")
    assert launch([SCRIPT, str(folder), "transport"], SIZE, {"MESHWRIGHT_SHARED_MEMORY": "off"}, timeout=60) == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.mark.parametrize("program", programs.RIGHT, ids=lambda program: program.__name__)
def test_processes_over_gloo_give_the_results_of_simulated_ranks(three: list[dict[str, Any]], program: Any) -> None:
    for rank, expected in enumerate(simulate(program, SIZE)):
        found = three[rank]["right"][program.__name__]
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True, msg=name)


class Recorded(Backend):
    """A backend that records its calls; every rank sends what this one sends."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def exchange(self, sends: Any, receives: Any) -> None:
        self.seen.append(f"{len(sends)} messages")
        for (_, _, sent), (_, _, received) in zip(sends, receives, strict=True):
            received.copy_(sent)

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, op: str) -> None:
        self.seen.append("all_reduce")

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.seen.append("all_gather")

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.seen.append("reduce_scatter")


@pytest.mark.parametrize("place", range(SIZE))
@pytest.mark.parametrize("over", [False, True])
def test_an_operand_is_overwritten_only_if_it_was_given_up(place: int, over: bool) -> None:
    x = torch.tensor([1.0, 2.0])
    found = x if over else torch.empty_like(x)
    DirectExchange(Recorded(), place, SIZE).all_reduce(found, x, "sum")
    assert found.tolist() == [3.0, 6.0]
    assert over or x.tolist() == [1.0, 2.0]


def test_larger_tensors_go_around_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_exchange, "_MOST", 64)
    backend = Recorded()
    transport = DirectExchange(backend, 0, SIZE)
    for size in (8, 9, 0):
        x = torch.ones(size)
        transport.all_reduce(x.clone(), x, "sum")
        transport.all_gather(torch.empty(SIZE * size), x)
        transport.reduce_scatter(torch.empty(size), torch.ones(SIZE * size))
    assert backend.seen == ["2 messages"] * 3 + ["all_reduce", "all_gather", "reduce_scatter"] * 2
