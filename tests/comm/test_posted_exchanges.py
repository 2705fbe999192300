"""A transport that posts exchanges as messages: the results do not depend on which rank is first."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import Tensor

from meshwright.comm import (
    CallError,
    Communicator,
    PeerlessCommunicator,
    PostedCommunicator,
    current_communicator,
    install_communicator,
    simulate,
)

CPU = torch.device("cpu")
WORLD = (0, 1, 2)


def exchanged(ranks: Communicator, times: int) -> list[list[float]]:
    """Return the data that a rank receives when every rank sends tensors of several shapes to every other rank."""
    found: list[Tensor] = []
    for n in range(times):
        peers = [peer for peer in WORLD if peer != ranks.rank]
        sends = [(peer, torch.full((n + peer + 1,), 100.0 * n + 10 * ranks.rank + peer)) for peer in peers]
        receives = [(peer, (n + ranks.rank + 1,), torch.float32, CPU) for peer in peers]
        found += ranks.exchange(sends, receives, WORLD)
    return [x.tolist() for x in found]


def test_exchanges_are_those_of_the_inner_communicator() -> None:
    def program() -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        inner = current_communicator()
        posted, expected = PostedCommunicator(inner), exchanged(inner, 3)
        with posted.during(4):
            assert current_communicator() is posted
            first = exchanged(current_communicator(), 3)
        assert current_communicator() is inner
        with posted.during(4):  # numbers start again
            return expected, first, exchanged(posted, 3)

    for expected, first, second in simulate(program, 3):
        assert expected == first == second


def test_works_may_run_in_another_order() -> None:
    """Rank 0 runs its works in another order than rank 1, and each message still reaches the right work."""

    def program() -> list[float]:
        posted, here = PostedCommunicator(current_communicator()), current_communicator().rank
        found = [0.0, 0.0]
        for work in (0, 1) if here == 0 else (1, 0):
            with posted.during(work):
                if here == 0:
                    posted.exchange([(1, torch.tensor([1.0 + work])), (1, torch.tensor([3.0 + work]))], [], (0, 1))
                else:
                    receives = [(0, (1,), torch.float32, CPU)] * 2
                    found[work] = sum(x.item() * 10**n for n, x in enumerate(posted.exchange([], receives, (0, 1))))
        return found

    assert simulate(program, 2)[1] == [31.0, 42.0]


def test_collectives_are_those_of_the_inner_communicator() -> None:
    def program() -> None:
        inner = current_communicator()
        posted, x = PostedCommunicator(inner), torch.arange(4.0) + inner.rank
        shapes = [(4,)] * 3
        assert posted.rank == inner.rank
        assert posted.size == inner.size
        pairs = [
            (lambda c: c.all_reduce(x, "sum", WORLD)),
            (lambda c: torch.stack(c.all_gather(x, WORLD, shapes))),
            (lambda c: c.reduce_scatter([x, x + 1, x + 2], "sum", WORLD)),
            (lambda c: torch.stack(c.all_to_all([x, x + 1, x + 2], shapes, WORLD))),
        ]
        with posted.during(0):
            for call in pairs:
                assert torch.equal(call(posted), call(inner))
        assert posted.seen is inner.seen
        posted.barrier(WORLD)

    simulate(program, 3)


@pytest.mark.parametrize("work", [-1, 1 << 31])
def test_numbers_of_works_are_bounded(work: int) -> None:
    with (
        pytest.raises(CallError, match="not in 0 to 65535"),
        PostedCommunicator(PeerlessCommunicator(0, 1)).during(work),
    ):
        pass


def test_backward_threads_use_the_communicator_of_the_process() -> None:
    everywhere = PeerlessCommunicator(0, 4)
    posted, seen = PostedCommunicator(everywhere), []
    install_communicator(everywhere)
    try:
        with posted.during(1):
            thread = Thread(target=lambda: seen.append(current_communicator()))
            thread.start()
            thread.join()
        assert seen == [posted]
        assert current_communicator() is everywhere
        with pytest.raises(ZeroDivisionError), posted.during(1):
            1 / 0  # noqa: B018 - the error is the point
        assert current_communicator() is everywhere
    finally:
        install_communicator(None)
