"""The system's records of processes, and the conclusions of a waiting rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator

import pytest

from meshwright.comm.checking import wait_timer as watches
from meshwright.comm.checking.wait_timer import WaitTimer
from meshwright.comm.launcher.process_state import ProcessIdentity, ProcessState, own_identity
from meshwright.comm.launcher.reaper import end_marked, marked, start_of
from meshwright.comm.transport.rank_state import RankState, read_state, silent

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc"), reason="the system has no /proc")
CODE = "from time import sleep; print(flush=True); sleep(60)"


@pytest.fixture
def process() -> Generator[subprocess.Popen[bytes]]:
    found = subprocess.Popen([sys.executable, "-S", "-c", CODE], stdout=subprocess.PIPE, env={"MARK": "a-test-of-life"})
    assert found.stdout is not None
    found.stdout.readline()
    yield found
    found.kill()
    found.wait()
    found.stdout.close()


def awaited(identity: ProcessIdentity, life: ProcessState) -> bool:
    end = time.monotonic() + 20
    while identity.life is not life and time.monotonic() < end:
        time.sleep(0.01)
    return identity.life is life


def test_states_of_a_process_are_read(process: subprocess.Popen[bytes]) -> None:
    own = own_identity()
    identity = ProcessIdentity(own.system, process.pid, start_of(process.pid))
    assert own.life is ProcessState.RUNNING
    assert identity.life is ProcessState.RUNNING
    process.send_signal(signal.SIGSTOP)
    assert awaited(identity, ProcessState.STOPPED)
    process.send_signal(signal.SIGCONT)
    assert awaited(identity, ProcessState.RUNNING)
    process.kill()
    assert awaited(identity, ProcessState.GONE)  # and a zombie still
    assert process.wait() == -signal.SIGKILL
    assert identity.life is ProcessState.GONE


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    own = own_identity()
    assert own._replace(started=own.started - 1).life is ProcessState.GONE
    assert own._replace(system="another host").life is ProcessState.UNKNOWN
    assert own._replace(system="").life is ProcessState.UNKNOWN


def test_marked_processes_are_found_and_ended(process: subprocess.Popen[bytes]) -> None:
    assert marked("MARK=a-test-of-life") == {process.pid: start_of(process.pid)}
    assert marked("MARK=another-test") == {}
    end_marked("MARK=a-test-of-life")
    assert process.wait(20) == -signal.SIGKILL


def test_a_state_is_sent_between_ranks_and_other_data_is_refused() -> None:
    state = RankState("barrier()", (1, 2), 3, True, False, True, "all_reduce", "a.py:3", 0.5)
    text = json.dumps(state)
    assert read_state(json.loads(text)) == state
    fields = json.loads(text)
    wrong: list[object] = [fields[:at] for at in range(len(fields))]
    wrong += [{}, None, "", 3, [*fields, 1]]
    for at in range(len(fields)):
        wrong += [[*fields[:at], other, *fields[at + 1 :]] for other in ({}, None, b"", object())]
    for each in wrong:
        with pytest.raises(ValueError, match="no state of a rank"):
            read_state(each)


def test_the_error_gives_the_reason_for_a_silent_rank() -> None:
    assert str(silent("its process is stopped", stopped=True)) == "does not answer: its process is stopped"
    assert str(RankState("", (), 2, last="barrier()", at="a.py:3")) == (
        "is in no collective after 2 calls, the last barrier(); it is at a.py:3"
    )


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now


def test_time_in_which_the_waiting_rank_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(watches, "time", clock)
    watch = WaitTimer(limit=20.0, patience=100.0)
    clock.now += 1
    assert watch.is_time()
    watch.note_life(1, ProcessState.STOPPED)
    clock.now += 26  # the whole job pauses
    watch.is_time()
    assert not watch.is_late()
    assert not watch.is_still_stopped(1)
    for _ in range(40):
        clock.now += 0.5
        watch.is_time()
    assert watch.is_late()


def test_a_process_counts_as_stopped_after_two_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(watches, "time", clock)
    watch = WaitTimer(limit=20.0, patience=100.0)
    watch.note_life(1, ProcessState.STOPPED)
    assert not watch.is_still_stopped(1)
    clock.now += 0.5
    watch.note_life(1, ProcessState.STOPPED)
    assert watch.is_still_stopped(1)
    watch.note_life(1, ProcessState.RUNNING)
    assert not watch.is_still_stopped(1)
