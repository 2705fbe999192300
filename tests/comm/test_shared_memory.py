"""Reductions and transfers through memory that ranks share; threads take the place of processes."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from meshwright.comm.communicators.reductions import REDUCTIONS, reduce_terms
from meshwright.comm.transport import shared_memory, shared_region
from meshwright.comm.transport.control_links import Frame, Link
from meshwright.comm.transport.ring_buffer import RING, ConnectionClosedError, Ring
from meshwright.comm.transport.shared_memory import SharedMemoryTransport, open_shared

SHORT = timedelta(seconds=20)
SLOT = 3072
"""Bytes in a slot, so few that messages take several rounds; divisible among groups of 2, 3 or 4."""

Ranks = list[SharedMemoryTransport]


def group_of(size: int, limit: timedelta = SHORT) -> Ranks:
    """Return the members of one group, in one process."""
    memory = mmap.mmap(-1, size * (64 + 2 * shared_memory.SLOT))
    return [SharedMemoryTransport(memory, place, size, limit) for place in range(size)]


def on_all(ranks: Ranks, call: Callable[[int, SharedMemoryTransport], Any]) -> list[Any]:
    """Return the results of all members when all call at once."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [found.result(60) for found in [threads.submit(call, n, rank) for n, rank in enumerate(ranks)]]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT", SLOT)
    monkeypatch.setattr(shared_memory, "_SHARED", 512)


def random_tensor(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return values.to(dtype)


sizes = st.sampled_from([2, 3, 4])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.complex64])
lengths = st.integers(0, 2500)
many = settings(max_examples=25, deadline=None)


@many
@given(size=sizes, dtype=dtypes, length=lengths, op=st.sampled_from(["sum", "prod", "max", "min"]), over=st.booleans())
def test_a_reduction_has_the_bits_of_combining_in_order(
    size: int, dtype: torch.dtype, length: int, op: str, over: bool
) -> None:
    if REDUCTIONS[op].refuses(dtype):
        return
    terms = [random_tensor(length, dtype=dtype, seed=n) for n in range(size)]

    def call(n: int, rank: SharedMemoryTransport) -> Tensor:
        x = terms[n].clone()
        out = x if over else torch.empty_like(x)
        rank.all_reduce(out, x, op)
        assert over or torch.equal(x, terms[n])
        return out

    for found in on_all(group_of(size), call):
        torch.testing.assert_close(found, reduce_terms(terms, op), rtol=0, atol=0, equal_nan=True)


@many
@given(size=sizes, dtype=dtypes, length=lengths)
def test_gathers_and_scatters_give_every_rank_its_parts(size: int, dtype: torch.dtype, length: int) -> None:
    terms = [random_tensor(size, length, dtype=dtype, seed=n) for n in range(size)]

    def call(n: int, rank: SharedMemoryTransport) -> tuple[Tensor, Tensor]:
        gathered, scattered = terms[0].new_empty(size * length), terms[0].new_empty(length)
        rank.all_gather(gathered, terms[n][0])
        rank.barrier()
        rank.reduce_scatter(scattered, terms[n].view(-1))
        last = terms[n][0].clone()
        rank.broadcast(last, size - 1)
        assert torch.equal(last, terms[-1][0])
        return gathered, scattered

    total = reduce_terms(terms, "sum")
    for n, (gathered, scattered) in enumerate(on_all(group_of(size), call)):
        assert torch.equal(gathered, torch.cat([term[0] for term in terms]))
        assert torch.equal(scattered, total[n])


@many
@given(data=st.data(), size=sizes)
def test_all_to_all_exchanges_pieces_of_any_length(data: st.DataObject, size: int) -> None:
    table = [[data.draw(st.integers(0, 3000)) for _ in range(size)] for _ in range(size)]
    messages = data.draw(st.integers(1, 2))
    pieces = [
        [random_tensor(table[a][b], dtype=torch.uint8, seed=a * size + b) for b in range(size)] for a in range(size)
    ]

    def call(n: int, rank: SharedMemoryTransport) -> tuple[Tensor, list[Tensor]]:
        arriving = [table[a][n] for a in range(size)]
        out = torch.empty(sum(arriving), dtype=torch.uint8)
        rank.all_to_all(out, torch.cat(pieces[n]), arriving, table[n])
        found = [torch.empty(length, dtype=torch.uint8) for length in arriving]
        sent = [(b, tag, x) for b in range(size) for tag, x in enumerate(pieces[n][b].tensor_split(messages))]
        awaited = [(a, tag, x) for a in range(size) for tag, x in enumerate(found[a].tensor_split(messages))]
        rank.exchange(sent, awaited)
        return out, found

    for n, (out, found) in enumerate(on_all(group_of(size), call)):
        expected = [pieces[a][n] for a in range(size)]
        assert torch.equal(out, torch.cat(expected))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_different_amounts_raise_an_error() -> None:
    def call(n: int, rank: SharedMemoryTransport) -> str:
        with pytest.raises(RuntimeError, match=r"ranks send \[3, 4\] elements"):
            rank.all_reduce(torch.ones(3 + n), torch.ones(3 + n), "sum")
        return "told"

    assert on_all(group_of(2), call) == ["told", "told"]


def test_nobody_waits_for_an_ended_rank() -> None:
    first, second = group_of(2)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    second._flags[second._mine + 1] = ended.pid
    with pytest.raises(RuntimeError, match="process of the rank at index 1 in the group has ended"):
        first.barrier()


def test_ranks_wait_for_a_missing_rank_until_the_limit() -> None:
    with pytest.raises(RuntimeError, match=r"the rank at index 1 did not join the call within 0\.01 s"):
        group_of(2, timedelta(seconds=0.01))[0].barrier()


def opened(size: int) -> list[SharedMemoryTransport | None]:
    store: Any = HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda place: open_shared(store, place, size, SHORT), range(size)))


def names() -> set[str]:
    return {path.name for path in shared_region.FOLDER.glob("meshwright-*")}


@pytest.mark.skipif(not shared_region.host_identity(), reason="this machine shares no memory between processes")
def test_opening_leaves_no_file_behind() -> None:
    before = names()
    ranks = [rank for rank in opened(3) if rank is not None]
    assert len(ranks) == 3
    assert names() == before
    on_all(ranks, lambda n, rank: rank.barrier())


def test_nobody_shares_if_one_rank_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_SHARED_MEMORY", "off")
    assert opened(2) == [None, None]


def test_nobody_shares_without_enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "create_region", lambda size: None)
    assert opened(2) == [None, None]


@pytest.mark.parametrize("name", ["", "meshwright-", "meshwright-../x", "other", "meshwright-0123"])
def test_shared_memory_with_a_bad_name_is_refused(name: str) -> None:
    assert shared_region.attach_region(name, 64) is None


@many
@given(messages=st.lists(st.binary(min_size=1, max_size=3000), max_size=60))
def test_a_ring_buffer_keeps_the_order_of_bytes(messages: list[bytes]) -> None:
    memory, (here, there) = mmap.mmap(-1, 2 * RING), socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as other:
        first, second = Ring(memory, first=True), Ring(memory, first=False)
        other.submit(lambda: [first.send(data, here) for data in messages])
        found = b""
        while len(found) < sum(map(len, messages)):
            found += second.receive(5.0, there)
        assert found == b"".join(messages)
        assert first.receive(0.0, here) == b""


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=RING // 4), st.integers(1, RING), st.booleans()), max_size=20))
def test_only_awaited_bytes_are_read(messages: list[tuple[bytes, int, bool]]) -> None:
    memory, (here, there) = mmap.mmap(-1, 2 * RING), socket.socketpair()
    with here, there:
        first, second = Ring(memory, first=True), Ring(memory, first=False)
        for data, cut, is_awaited in messages:
            first.send(data, here)
            head, behind = data[:cut], data[cut:]
            other = head[:-1] + bytes([head[-1] ^ 1])
            found = second.read_behind(head if is_awaited else other, len(behind), waits=False)
            assert found == behind if is_awaited and found is not None else found is None
            assert found is not None or second.receive(0.0, there) == data
            assert second.read_behind(head, len(behind), waits=False) is None


@given(st.lists(st.tuples(st.binary(max_size=300), st.none() | st.binary(max_size=300), st.booleans()), max_size=10))
def test_frames_arrive_through_a_connection_as_they_were_sent(frames: list[tuple[bytes, bytes | None, bool]]) -> None:
    """On the fast path, which knows the bytes before the data, and on the other one; also if several have arrived."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as wire, server.accept()[0] as other:
        first, second = Link(wire), Link(other)
        sent = [Frame(1, number, 2, 3, 4, text, 5, data) for number, (text, data, _) in enumerate(frames)]
        for frame in sent:
            first.send(frame.packed())
        for frame, (_, data, is_fast) in zip(sent, frames, strict=True):
            length = len(data or b"")
            head = frame.packed()[: -length or None]
            other_head = head[:-1] + bytes([head[-1] ^ 1])
            assert second.read_behind(other_head, length, waits=True) is None
            if is_fast:
                assert second.read_behind(head, length, waits=True) == (data or b"")
            else:
                assert second.receive(5.0) == frame
        assert second.receive(0.0) is None


def test_the_end_of_a_ring_buffer_comes_after_its_data() -> None:
    memory, (here, there) = mmap.mmap(-1, 2 * RING), socket.socketpair()
    first, second = Ring(memory, first=True), Ring(memory, first=False)
    first.send(b"last", here)
    here.close()
    assert second.receive(5.0, there) == b"last"
    with pytest.raises(ConnectionClosedError):
        second.receive(5.0, there)
    there.close()


@pytest.mark.parametrize(("ranks", "looks"), [("", 400), ("2", 400), ("3", 50), ("x", 400)])
def test_ranks_on_a_shared_processor_poll_rarely(ranks: str, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert shared_region.checks_before_sleep.__wrapped__()[0] == looks
