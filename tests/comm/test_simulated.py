"""Simulated ranks against the definition of every collective, and all kinds of wrong calls."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm import (
    CallError,
    DeadlockError,
    DisagreementError,
    MissingCallError,
    NestedSimulationError,
    NoCommunicatorError,
    PeerlessCommunicator,
    current_communicator,
    install_communicator,
    simulate,
    using_communicator,
)

CPU = torch.device("cpu")

MEANING: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "prod": lambda stack: stack.prod(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "any": lambda stack: stack.any(0).to(stack.dtype),
    "all": lambda stack: stack.all(0).to(stack.dtype),
}


def world() -> tuple[int, ...]:
    return tuple(range(current_communicator().size))


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("op", MEANING)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_a_reduction_equals_its_definition(op: str, shape: tuple[int, ...]) -> None:
    whole = values(3, 3, *shape).round()  # rank, piece, shape

    def program() -> tuple[Tensor, Tensor]:
        mine = whole[current_communicator().rank]
        return current_communicator().all_reduce(mine[0], op, world()), current_communicator().reduce_scatter(
            list(mine), op, world()
        )

    for rank, (reduced, piece) in enumerate(simulate(program, 3)):
        torch.testing.assert_close(reduced, MEANING[op](whole[:, 0]))
        torch.testing.assert_close(piece, MEANING[op](whole[:, rank]))


@given(
    lengths=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=3, max_size=3),
    group=st.permutations([0, 1, 2]),
)
def test_pieces_of_any_length_arrive_at_the_right_rank(lengths: list[list[int]], group: list[int]) -> None:
    order = tuple(group)
    cuts = [list(accumulate([0, *row])) for row in lengths]
    whole = [values(cuts[rank][-1], 2, seed=rank) for rank in range(3)]
    pieces = [[whole[i][cuts[i][j] : cuts[i][j + 1]] for j in range(3)] for i in range(3)]  # from, to

    def program() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        ranks, me = current_communicator(), current_communicator().rank
        return (
            ranks.all_gather(pieces[me][0], order, [pieces[peer][0].shape for peer in order]),
            ranks.all_to_all([pieces[me][to] for to in order], [pieces[peer][me].shape for peer in order], order),
            ranks.exchange(
                [(to, pieces[me][to]) for to in range(3)],
                [(peer, pieces[peer][me].shape, torch.float64, CPU) for peer in order],
                order,
            ),
        )

    for rank, (gathered, swapped, exchanged) in enumerate(simulate(program, 3)):
        for found, expected in [
            (gathered, [pieces[peer][0] for peer in order]),
            (swapped, [pieces[peer][rank] for peer in order]),
            (exchanged, [pieces[peer][rank] for peer in order]),
        ]:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_messages_between_two_ranks_keep_their_order() -> None:
    def program() -> list[float]:
        sends = [(1, torch.tensor(float(n))) for n in range(3)] if current_communicator().rank == 0 else []
        receives = [(0, (), torch.float32, CPU)] * 3 if current_communicator().rank == 1 else []
        return [x.item() for x in current_communicator().exchange(sends, receives, (0, 1))]

    assert simulate(program, 2) == [[], [0.0, 1.0, 2.0]]


def test_outputs_are_new_and_contiguous_and_inputs_unchanged() -> None:
    def program() -> None:
        ranks, group = current_communicator(), world()
        x = torch.ones(3, 2).t()
        outs = [
            ranks.all_reduce(x, "sum", group),
            ranks.reduce_scatter([x, x], "sum", group),
            *ranks.all_gather(x, group, [x.shape] * 2),
            *ranks.all_to_all([x, x], [x.shape] * 2, group),
            ranks.all_reduce(x, "sum", (ranks.rank,)),
        ]
        ranks.barrier(group)
        assert all(out.is_contiguous() for out in outs)
        for out in outs:
            out.zero_()
        ranks.barrier(group)
        assert x.eq(1).all()

    simulate(program, 2)


def test_nan_of_one_rank_reaches_all() -> None:
    def program() -> Tensor:
        x = torch.tensor([float("nan"), 0.0]).roll(current_communicator().rank)
        return torch.stack([current_communicator().all_reduce(x, op, world()) for op in ("max", "min", "sum")])

    assert all(found.isnan().all() for found in simulate(program, 2))


def test_a_reduction_adds_in_rank_order_in_its_own_dtype() -> None:
    terms = [torch.tensor(x, dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    (found, *_) = simulate(
        lambda: current_communicator().all_reduce(terms[current_communicator().rank], "sum", world()), 3
    )
    assert found.item() == 256.0


def test_one_rank_runs_at_a_time_in_rank_order() -> None:
    trace: list[tuple[int, str]] = []

    def program() -> None:
        for step in "ab":
            trace.append((current_communicator().rank, step))
            current_communicator().barrier(world())

    simulate(program, 3)
    assert trace == [(0, "a"), (1, "a"), (2, "a"), (2, "b"), (0, "b"), (1, "b")]


def test_every_rank_has_its_own_generator_with_the_same_seed() -> None:
    def program() -> list[float]:
        first = torch.rand(1).item()
        if current_communicator().rank == 1:
            torch.rand(7)
        current_communicator().barrier(world())
        return [first, torch.rand(1).item()]

    torch.manual_seed(3)
    alone = torch.rand(3).tolist()
    torch.manual_seed(3)
    ranks = simulate(program, 2)
    assert ranks[0] == alone[:2]
    assert ranks[1][0] == alone[0]
    assert ranks[1][1] != alone[1]
    assert torch.rand(1).item() == alone[2]


def test_ranks_inherit_the_modes_of_the_caller() -> None:
    def modes() -> tuple[bool, bool, bool, str]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.empty(0).device.type,
        )

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        assert simulate(modes, 2) == [modes()] * 2
    with torch.inference_mode():
        assert simulate(modes, 2) == [modes()] * 2
    assert simulate(modes, 2) == [modes()] * 2


def test_a_backward_pass_stays_on_its_rank() -> None:
    def program() -> list[int]:
        seen: list[int] = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: seen.append(current_communicator().rank))
        (x * 2).sum().backward()
        return seen

    assert simulate(program, 2) == [[0], [1]]


def test_the_first_error_is_raised_with_its_rank() -> None:
    cleaned: list[int] = []

    def program() -> None:
        try:
            if current_communicator().rank == 1:
                raise KeyError("mine")
            current_communicator().barrier(world())
        finally:
            cleaned.append(current_communicator().rank)

    with pytest.raises(KeyError, match="mine") as caught:
        simulate(program, 3)
    (note,) = caught.value.__notes__
    assert note.startswith(f"raised on rank 1 of 3 simulated ranks, at {__file__}:")
    assert cleaned == [1, 0] or cleaned == [1, 2, 0]


def test_an_interrupt_stops_computing_ranks() -> None:
    def program() -> None:
        while True:
            sum(range(100))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell runs us behind it
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        simulate(program, 2)
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def differ(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    return lambda: second() if current_communicator().rank else first()


X = torch.ones(4)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            lambda: current_communicator().all_reduce(X, "sum", (0, 1)),
            lambda: current_communicator().all_reduce(X.double(), "sum", (0, 1)),
            "rank 0 calls all_reduce(sum, float32, (4,)) on ranks 0, 1; rank 1 calls all_reduce(sum, float64, (4,))",
        ),
        (
            lambda: current_communicator().all_reduce(X, "sum", (0, 1)),
            lambda: current_communicator().all_reduce(X, "max", (0, 1)),
            "the reductions differ",
        ),
        (
            lambda: current_communicator().all_reduce(X, "sum", (0, 1)),
            lambda: current_communicator().all_reduce(X[1:], "sum", (0, 1)),
            "the shapes differ",
        ),
        (
            lambda: current_communicator().all_reduce(X, "sum", (0, 1)),
            lambda: current_communicator().barrier((0, 1)),
            "the ranks make different collectives",
        ),
        (
            lambda: current_communicator().barrier((0, 1)),
            lambda: current_communicator().barrier((1, 0)),
            "in different orders",
        ),
        (
            lambda: current_communicator().all_gather(X, (0, 1), [(4,), (4,)]),
            lambda: current_communicator().all_gather(X, (0, 1), [(3,), (4,)]),
            "the shapes differ",
        ),
        (
            lambda: current_communicator().all_to_all([X, X[1:]], [(4,), (4,)], (0, 1)),
            lambda: current_communicator().all_to_all([X, X], [(4,), (4,)], (0, 1)),
            "rank 0 sends (3,) and rank 1 expects (4,)",
        ),
        (
            lambda: current_communicator().exchange([(1, X)], [], (0, 1)),
            lambda: current_communicator().exchange([], [], (0, 1)),
            "rank 0 sends 1 message(s)",
        ),
    ],
)
def test_calls_that_differ_are_named(first: Callable[[], object], second: Callable[[], object], words: str) -> None:
    with pytest.raises(DisagreementError) as caught:
        simulate(differ(first, second), 2)
    assert words in re.sub(r" at [^;\n]+:\d+", "", str(caught.value))


def test_a_ring_of_waiting_ranks_raises_a_deadlock() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(lambda: current_communicator().barrier(((0, 1), (1, 2), (0, 2))[current_communicator().rank]), 3)
    for words in ("rank 0 waits in barrier() on ranks 0, 1", "rank 2 waits in barrier() on ranks 0, 2"):
        assert words in str(caught.value)


def test_a_rank_that_ends_early_is_named() -> None:
    with pytest.raises(MissingCallError, match="rank 1 ended"):
        simulate(lambda: current_communicator().rank != 1 and current_communicator().barrier((0, 1, 2)), 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: current_communicator().all_reduce(X, "mean", (0, 1)), "'mean'"),
        (lambda: current_communicator().all_reduce(X.long(), "avg", (0, 1)), "no exact meaning"),
        (lambda: current_communicator().all_reduce(X.bool(), "sum", (0, 1)), "any"),
        (lambda: current_communicator().all_reduce(X.cfloat(), "max", (0, 1)), "no exact meaning"),
        (lambda: current_communicator().barrier((1 - current_communicator().rank,)), "not in the group"),
        (lambda: current_communicator().barrier((0, 1, 0)), "twice"),
        (lambda: current_communicator().barrier((0, 1, 2)), "ranks 0 to 1"),
        (lambda: current_communicator().all_gather(X, (0, 1), [(4,)]), "1 shapes"),
        (lambda: current_communicator().all_gather(X, (0, 1), [(3,), (3,)]), "rank 0 has shape (4,)"),
        (lambda: current_communicator().all_to_all([X, X], [(2,), (2,)], (0, 1)), "from itself"),
        (lambda: current_communicator().reduce_scatter([X], "sum", (0, 1)), "1 pieces"),
        (lambda: current_communicator().reduce_scatter([X, X.double()], "sum", (0, 1)), "one dtype"),
        (lambda: current_communicator().exchange([(current_communicator().rank, X)], [], (0, 1)), "sends itself"),
        (lambda: current_communicator().exchange([(2, X)], [], (0, 1)), "ranks [2]"),
    ],
)
def test_an_invalid_call_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(CallError) as caught:
        simulate(call, 2)
    assert words in str(caught.value)


def test_a_simulation_inside_a_rank_is_refused() -> None:
    with pytest.raises(NestedSimulationError):
        simulate(lambda: simulate(current_communicator, 2), 2)
    with pytest.raises(CallError):
        simulate(current_communicator, 0)


def test_a_thread_uses_its_own_communicator_or_that_of_the_process() -> None:
    with pytest.raises(NoCommunicatorError, match=r"mw\.simulate"):
        current_communicator()
    everywhere, here = PeerlessCommunicator(0, 4), PeerlessCommunicator(1, 4)
    install_communicator(everywhere)
    try:
        with using_communicator(here):
            assert current_communicator() is here
        assert current_communicator() is everywhere
        assert simulate(lambda: current_communicator().kind, 2) == ["simulated"] * 2
    finally:
        install_communicator(None)


def test_calls_and_received_bytes_are_exact() -> None:
    def program() -> tuple[dict[str, int], dict[str, int], list[str]]:
        ranks, group = current_communicator(), world()
        x = torch.ones(4, dtype=torch.float16)
        with ranks.seen.record_calls() as log:
            ranks.all_reduce(x, "sum", group)
            ranks.all_gather(x[: ranks.rank], group, [(peer,) for peer in group])
            ranks.reduce_scatter([x[:to] for to in group], "sum", group)
            ranks.all_to_all([x[:1]] * 3, [(1,)] * 3, group)
            ranks.barrier(group)
            ranks.all_reduce(x, "sum", (ranks.rank,))
        return ranks.seen.calls, ranks.seen.received, [f"{call.kind} {call.numel}" for call in log]

    calls, received, log = simulate(program, 3)[2]
    assert calls == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "barrier": 1}
    assert received == {"all_reduce": 11, "all_gather": 2, "reduce_scatter": 8, "all_to_all": 4, "barrier": 0}
    assert log == ["all_reduce 4", "all_gather 2", "reduce_scatter 3", "all_to_all 3", "barrier 0"]
