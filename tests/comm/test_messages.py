"""Messages on simulated ranks, then one launch of three processes, then the communicators without peers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _message_programs as programs

from meshwright.comm import (
    CallError,
    Communicator,
    DeadlockError,
    DelayedCommunicator,
    DisagreementError,
    MissingCallError,
    PeerlessCommunicator,
    current_communicator,
    launch,
    simulate,
)

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = str(Path(programs.__file__))
X = torch.ones(2)


def receive(peer: int, tag: int, communicator: Communicator | None = None) -> Tensor:
    return (communicator or current_communicator()).receive(peer, tag, (2,), torch.float32, "cpu")


def by_rank(*programs: Callable[[], object]) -> Callable[[], object]:
    def program() -> object:
        return programs[current_communicator().rank]()

    return program


def test_received_messages_equal_sent_ones() -> None:
    sent, first, second = simulate(programs.kinds, 3)
    assert sent == {}
    cases = [(dtype, shape) for dtype in programs.DTYPES for shape in programs.SHAPES]
    expected = [programs.values(shape, dtype, tag) for tag, (dtype, shape) in enumerate(cases)]
    for found in (first, second):
        torch.testing.assert_close(found["received"], expected[::-1], rtol=0, atol=0)


def test_an_operand_may_have_any_form_and_is_copied() -> None:
    x = programs.values((4, 3), torch.float32, 1)
    found = simulate(programs.forms, 3)[1]["received"]
    for got, expected in zip(found[:2] + found[3:], [x.t(), x[::2, 1:], 2 * x, x], strict=True):
        assert torch.equal(got, expected)
        assert got.is_contiguous()
        assert not got.requires_grad


def test_received_tensors_share_no_memory_with_the_sender() -> None:
    def program() -> Tensor:
        ranks = current_communicator()
        x = torch.ones(2)
        ranks.send(x, 1 - ranks.rank, 0)
        ranks.send(x, ranks.rank, 0)
        receive(1 - ranks.rank, 0).zero_()
        receive(ranks.rank, 0).zero_()
        return x

    assert all(x.eq(1).all() for x in simulate(program, 2))


def test_messages_of_one_tag_keep_their_order() -> None:
    for rank, found in enumerate(simulate(programs.same_tag, 3)):
        for peer, messages in found.items():
            assert [x.tolist() for x in messages] == [[int(peer), rank, number] for number in range(3)]


def test_many_messages_wait_until_they_are_received() -> None:
    for found in simulate(programs.crossed, 3)[:2]:
        assert [x[0].item() for x in found["large"]] == [2, 0, 3, 1]
        assert all(x.eq((n * 7) % programs.MANY).all() for n, x in enumerate(found["small"]))


def test_messages_go_round_a_ring_between_collectives() -> None:
    assert [found["sum"][0].item() for found in simulate(programs.ring, 3)] == [16.0, 17.0, 15.0]


@given(st.data())
def test_messages_arrive_in_any_order_with_sends_first(data: st.DataObject) -> None:
    rank, tag = st.integers(0, 2), st.integers(0, 2)
    messages = data.draw(st.lists(st.tuples(rank, rank, tag), max_size=10))
    events = data.draw(st.permutations([*range(len(messages))] * 2))
    tables: list[list[tuple[str, int, int]]] = [[], [], []]
    seen: set[int] = set()
    for number in events:
        source, target, tag_ = messages[number]
        if number in seen:
            tables[target].append(("receive", source, tag_))
        else:
            seen.add(number)
            tables[source].append(("send", target, tag_))

    def program() -> list[tuple[int, int, list[float]]]:
        ranks, sent, found = current_communicator(), 0, []
        for kind, peer, tag in tables[ranks.rank]:
            if kind == "send":
                sent += 1
                ranks.send(torch.tensor([ranks.rank, sent], dtype=torch.float32), peer, tag)
            else:
                found.append((peer, tag, receive(peer, tag).tolist()))
        return found

    results = simulate(program, 3)
    for target, found in enumerate(results):
        for source in range(3):
            for tag_ in range(3):
                sends = [(to, t) for kind, to, t in tables[source] if kind == "send"]
                expected = [[source, n + 1] for n, to in enumerate(sends) if to == (target, tag_)]
                assert [value for peer, t, value in found if (peer, t) == (source, tag_)] == expected


def test_a_rank_that_waits_for_a_message_keeps_its_random_numbers() -> None:
    def program() -> float:
        if current_communicator().rank == 0:
            receive(1, 0)
        else:
            torch.rand(5)
            current_communicator().send(X, 0, 0)
        return torch.rand(1).item()

    torch.manual_seed(3)
    numbers = torch.rand(6).tolist()
    torch.manual_seed(3)
    assert simulate(program, 2) == [numbers[0], numbers[5]]


def test_ranks_that_wait_for_each_others_messages_are_named() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(
            by_rank(
                lambda: (current_communicator().send(X, 1, 6), receive(1, 5)),
                lambda: receive(0, 5),
                lambda: receive(0, 1),
            ),
            3,
        )
    for words in (
        "rank 0 waits in receive(float32, (2,), tag 5) from rank 1",
        "rank 1 waits in receive(float32, (2,), tag 5) from rank 0",
        "not received: rank 0 calls send(float32, (2,), tag 6) to rank 1",
    ):
        assert words in str(caught.value)


def test_a_message_that_a_collective_waits_for_is_named() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(
            by_rank(
                lambda: receive(1, 0),
                lambda: (current_communicator().barrier((0, 1)), current_communicator().send(X, 0, 0)),
            ),
            2,
        )
    assert "rank 0 waits in receive(float32, (2,), tag 0) from rank 1" in str(caught.value)
    assert "rank 1 waits in barrier() on ranks 0, 1" in str(caught.value)


def test_a_rank_that_waits_for_itself_raises() -> None:
    with pytest.raises(DeadlockError, match="has not sent itself this message"):
        simulate(lambda: receive(current_communicator().rank, 3), 2)


def test_a_sender_that_has_ended_is_named() -> None:
    with pytest.raises(MissingCallError) as caught:
        simulate(by_rank(lambda: receive(1, 4), lambda: None), 2)
    assert "rank 0 waits in receive(float32, (2,), tag 4) from rank 1" in str(caught.value)
    assert "; rank 1 ended" in str(caught.value)
    assert "a send for every receive" in str(caught.value)


def test_a_message_that_nobody_receives_is_named() -> None:
    with pytest.raises(MissingCallError, match=r"not received: rank 1 calls send\(float32, \(2,\), tag 8\) to rank 0"):
        simulate(by_rank(lambda: None, lambda: current_communicator().send(X, 0, 8)), 2)


def test_an_error_stops_ranks_that_wait_for_messages() -> None:
    cleaned: list[int] = []

    def program() -> None:
        try:
            if current_communicator().rank == 2:
                current_communicator().send(X, 0, 7)
                raise KeyError("mine")
            receive(2, 1)
        finally:
            cleaned.append(current_communicator().rank)

    with pytest.raises(KeyError, match="mine"):
        simulate(program, 3)
    assert sorted(cleaned) == [0, 1, 2]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_an_unexpected_message_is_refused(x: Tensor, target: int) -> None:
    program = by_rank(lambda: current_communicator().send(x, target, 2), lambda: None)
    with pytest.raises(DisagreementError) as caught:
        simulate(lambda: (program(), receive(0, 2) if current_communicator().rank == target else None), 2)
    dtype = str(x.dtype).removeprefix("torch.")
    assert f"rank 0 calls send({dtype}, {tuple(x.shape)}, tag 2) to rank {target}" in str(caught.value)
    assert f"rank {target} calls receive(float32, (2,), tag 2) from rank 0" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: current_communicator().send(X, 2, 0), "rank 2 as its peer"),
        (lambda: receive(-1, 0), "rank -1 as its peer"),
        (lambda: current_communicator().send(X, 1, -1), "tag -1"),
        (lambda: receive(1, 2**31), "tag 2147483648"),
    ],
)
def test_an_invalid_message_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(CallError) as caught:
        simulate(call, 2)
    assert words in str(caught.value)


def test_messages_are_counted_by_the_receiver() -> None:
    log, calls, received = simulate(programs.counts, 3)[2]
    assert calls == {"send": 10, "receive": 13, "all_reduce": 1}
    assert received == {"send": 0, "receive": 2 * 3 * 24 + 4 * 4, "all_reduce": 6}
    assert log[0] == "send(int64, (3,), tag 9) to rank 0"
    assert log[-1] == "receive(float32, (1,), tag 2147483647) from rank 1"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("messages")
    assert launch([SCRIPT, str(directory)], 3, timeout=90) == 128 + 9
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(3)]


@pytest.mark.parametrize("program", programs.RIGHT, ids=lambda program: program.__name__)
def test_processes_give_the_results_of_simulated_ranks(processes: list[dict[str, Any]], program: Any) -> None:
    for rank, expected in enumerate(simulate(program, 3)):
        found = processes[rank][program.__name__]
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def test_processes_count_the_calls_of_simulated_ranks(processes: list[dict[str, Any]]) -> None:
    assert [found["counts"] for found in processes] == simulate(programs.counts, 3)


def test_processes_refuse_unexpected_messages(processes: list[dict[str, Any]]) -> None:
    for case, expected in [("shape", "float32, (3, 2), tag 5"), ("dtype", "int32, (2, 3), tag 6")]:
        told = processes[1][case]
        assert told.startswith("DisagreementError")
        assert f"rank 1 calls receive({expected}) from rank 0" in told
        assert "rank 0 calls send(float32, (2, 3), tag" in told


def test_a_slow_sender_gives_a_warning(processes: list[dict[str, Any]]) -> None:
    (told,) = processes[1]["late"]
    assert "receive(float32, (1,), tag 7) from rank 0" in told
    assert "rank 0 is in no collective" in told


def test_processes_that_wait_for_each_other_raise_a_deadlock(processes: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        told = processes[rank]["deadlock"]
        assert told.startswith("DeadlockError")
        assert f"rank {1 - rank} is in receive(float32, (1,), tag 12) from rank {rank}, waiting for {rank}" in told
        assert f"has not received: rank {1 - rank} calls send(float32, (1,), tag 11) to rank {rank}" in told


def test_a_message_that_does_not_come_in_time_is_named(processes: list[dict[str, Any]]) -> None:
    assert processes[0]["limit"].startswith("MissingCallError")
    assert "receive(float32, (1,), tag 13) from rank 2" in processes[0]["limit"]


def test_a_sender_that_is_gone_ends_the_wait(processes: list[dict[str, Any]]) -> None:
    ended, killed = processes[1], processes[0]
    assert ended["lost"].startswith("MissingCallError")
    assert "rank 2 ended normally" in ended["lost"]
    assert killed["lost"].startswith("DeadPeerError")
    assert "rank 1 is dead" in killed["lost"]
    assert max(ended["seconds"], killed["seconds"]) < 15


def test_the_last_message_of_a_rank_outlives_it(processes: list[dict[str, Any]]) -> None:
    assert processes[0]["last words"] == 2.0 * programs.LARGE
    assert "rank 2 ended normally" in processes[0]["after the end"]


def test_a_communicator_without_peers_receives_zeros_and_its_own_messages() -> None:
    ranks = PeerlessCommunicator(1, 4)
    ranks.send(X, 3, 0)
    ranks.send(X, 1, 0)
    assert receive(1, 0, ranks).tolist() == [1.0, 1.0]
    assert receive(3, 0, ranks).tolist() == [0.0, 0.0]
    assert ranks.receive(2, 0, (4, 2), torch.bfloat16, "meta").shape == (4, 2)
    assert ranks.seen.calls == {"send": 2, "receive": 3}
    assert ranks.seen.received == {"send": 0, "receive": 8 + 16}


def test_a_delayed_message_arrives_after_the_delay() -> None:
    latency = 0.1

    def program() -> tuple[float, float, float]:
        ranks, began = DelayedCommunicator(current_communicator(), latency, bandwidth=1e9), time.monotonic()
        if ranks.rank == 0:
            for tag in range(3):
                ranks.send(X, 1, tag)
            return (time.monotonic() - began, 0.0, 0.0)
        first = receive(0, 2, ranks)
        waited = time.monotonic() - began
        others = [receive(0, tag, ranks) for tag in (0, 1)]
        assert all(torch.equal(x, X) for x in [first, *others])
        return (0.0, waited, time.monotonic() - began - waited)

    (sending, _, _), (_, waited, after) = simulate(program, 2)
    assert sending < latency / 2
    assert latency / 2 < waited
    assert after < latency / 2
