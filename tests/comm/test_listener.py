"""The port of a rank and the secret of a run: strangers are refused silently, and delay no rank."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

import pytest

from meshwright.comm import NoCommunicatorError
from meshwright.comm.launcher.rendezvous import RankAddress, host_store
from meshwright.comm.launcher.run_secret import LENGTH, VARIABLE, run_token, sealed, unsealed
from meshwright.comm.transport.listener import MOST_WAITING, Hello, Listener

TOKEN = bytes(range(16))
HELLO = Hello(b"L", 1, "a-name").packed(TOKEN)


class Taken:
    """The connections that a listener handed over."""

    def __init__(self) -> None:
        self.found: list[Hello] = []

    def __call__(self, hello: Hello, wire: socket.socket) -> None:
        self.found.append(hello)
        wire.sendall(b"+")
        wire.close()


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def listener(taken: Taken) -> Generator[Listener]:
    found = Listener("127.0.0.1", TOKEN, 2, taken)
    yield found
    found.close()


def connect(listener: Listener, data: bytes) -> socket.socket:
    wire = socket.create_connection(listener.address, timeout=20)
    wire.sendall(data)
    return wire


def answer(wire: socket.socket) -> bytes:
    with wire:
        try:
            return wire.recv(1)
        except ConnectionError:
            return b""


def test_wrong_tokens_and_invalid_ranks_are_refused(listener: Listener, taken: Taken) -> None:
    wrong = [HELLO[:at] + bytes([HELLO[at] ^ 1 << bit]) + HELLO[at + 1 :] for at in range(16) for bit in range(8)]
    wrong += [Hello(b"L", rank).packed(TOKEN) for rank in (2, 3, 2**31, 2**32 - 1)]
    assert all(answer(connect(listener, data)) == b"" for data in wrong)
    assert taken.found == []
    assert answer(connect(listener, HELLO)) == b"+"
    assert taken.found == [Hello(b"L", 1, "a-name")]


def test_an_incomplete_hello_delays_nobody_and_is_closed(listener: Listener, taken: Taken) -> None:
    begun = [connect(listener, HELLO[:length]) for length in range(len(HELLO))]
    assert len(begun) > MOST_WAITING
    assert answer(connect(listener, HELLO)) == b"+"
    assert [answer(wire) for wire in begun] == [b""] * len(begun)
    assert taken.found == [Hello(b"L", 1, "a-name")]


def test_a_hello_may_arrive_byte_by_byte(listener: Listener) -> None:
    wire = connect(listener, b"")
    for at in range(len(HELLO)):
        wire.sendall(HELLO[at : at + 1])
    assert answer(wire) == b"+"


def test_garbage_is_refused(listener: Listener, taken: Taken) -> None:
    for size in (1, 85, 5000, 2**20):
        wire = socket.create_connection(listener.address, timeout=20)
        try:
            wire.sendall(os.urandom(size))
        except ConnectionError:
            pass
        assert answer(wire) == b""
    assert answer(connect(listener, HELLO)) == b"+"


def test_a_listener_ends_at_once_with_waiting_connections(taken: Taken) -> None:
    found = Listener("127.0.0.1", TOKEN, 2, taken)
    wires = [connect(found, b"") for _ in range(5)]
    begin = time.monotonic()
    found.close()
    assert time.monotonic() - begin < 10
    assert all(answer(wire) == b"" for wire in wires)


def test_changed_values_and_values_of_another_key_are_refused() -> None:
    text = sealed(TOKEN, "at/1", '["127.0.0.1", 5]').encode()
    assert unsealed(TOKEN, "at/1", text) == '["127.0.0.1", 5]'
    others = [("at/1", text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]) for at in range(len(text))]
    others += [("at/1", text[:length]) for length in range(len(text))] + [("at/0", text), ("ended/1", text)]
    for key, data in others:
        with pytest.raises(NoCommunicatorError, match="without the seal"):
            unsealed(TOKEN, key, data)


def place(rank: int, size: int, port: int, host: str = "127.0.0.1") -> RankAddress:
    return RankAddress(rank, size, rank, host, port, True, "run/0")


def test_the_secret_is_not_in_the_store_of_one_machine_and_leaves_no_file() -> None:
    store = host_store("127.0.0.1", 0, 2, timedelta(seconds=20))
    first = run_token(place(0, 2, store.port), store, {})
    name = store.get("token").decode()
    file = next(folder / name for folder in (Path("/dev/shm"), Path("/tmp")) if (folder / name).exists())
    assert file.stat().st_mode & 0o777 == 0o600
    assert run_token(place(1, 2, store.port), store, {}) == first
    assert len(first) == LENGTH
    assert first.hex() not in name
    assert not file.exists()


def test_the_launcher_passes_the_secret_in_the_environment() -> None:
    store = host_store("127.0.0.1", 0, 1, timedelta(seconds=20))
    assert run_token(place(0, 1, store.port), store, {VARIABLE: TOKEN.hex()}) == TOKEN
    assert not store.check(["token"])
    for text in ("", "0", "g" * 32, TOKEN.hex() + "00"):
        with pytest.raises(NoCommunicatorError, match="hexadecimal digits in MESHWRIGHT_TOKEN"):
            run_token(place(0, 1, store.port), store, {VARIABLE: text})


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../etc/passwd", "meshwright-token-../x", "meshwright-token-absent", ""]
)
def test_a_stranger_cannot_choose_the_file_of_the_secret(name: str) -> None:
    store = host_store("127.0.0.1", 0, 2, timedelta(seconds=20))
    store.set("token", name)
    with pytest.raises(NoCommunicatorError, match="in the file that the store names"):
        run_token(place(1, 2, store.port), store, {})
