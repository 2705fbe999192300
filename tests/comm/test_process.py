"""Processes give the results of simulated ranks, and report errors. Two launches of three processes in all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import _programs as programs

from meshwright.comm import NoCommunicatorError, current_communicator, init_process, launch, simulate
from meshwright.comm.launcher.rendezvous import read_rank_address
from meshwright.comm.process.flat_tensors import flat, flat_joined
from meshwright.comm.process.process_communicator import Check, ProcessCommunicator
from meshwright.errors import DisagreementError

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = str(Path(programs.__file__))


def _story(directory: Path, name: str) -> tuple[int, list[dict[str, Any]]]:
    status = launch([SCRIPT, str(directory), name], 3, timeout=60)
    return status, [
        torch.load(path, weights_only=False) if (path := directory / f"{rank}.pt").exists() else {} for rank in range(3)
    ]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    status, found = _story(tmp_path_factory.mktemp("three"), "three")
    assert status == 0
    return found


@pytest.mark.parametrize("program", programs.RIGHT, ids=lambda program: program.__name__)
def test_processes_give_the_results_of_simulated_ranks(three: list[dict[str, Any]], program: Any) -> None:
    for rank, expected in enumerate(simulate(program, 3)):
        found = three[rank]["right"][program.__name__]
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_processes_count_the_calls_of_simulated_ranks(three: list[dict[str, Any]]) -> None:
    assert [found["calls"] for found in three] == [[str(call) for call in log] for log in simulate(programs.calls, 3)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("dtype", ("rank 0 calls all_reduce(sum, float32", "rank 1 calls all_reduce(sum, float64")),
        ("op", ("all_reduce(sum", "all_reduce(max")),
        ("shape", ("(4,)", "(3,)")),
        ("kind", ("rank 0 calls all_reduce", "rank 1 calls barrier")),
        ("sampled", ("earlier calls differ, which were not compared",)),
        ("group", ("on ranks 0, 1", "on ranks 1, 0")),
        ("pieces", ("all_to_all", "sends [(4,), (3,)]")),
        ("message", ("exchange", "receives [0: float32 (3,)]")),
    ],
)
def test_calls_that_differ_are_named_on_both_ranks(
    three: list[dict[str, Any]], case: str, words: tuple[str, ...]
) -> None:
    for rank in (0, 1):
        told = three[rank]["disagreements"][case]
        assert told.startswith("DisagreementError")
        assert all(word in told for word in words), told
    assert three[0]["disagreements"]["after"] == "[2.0, 2.0, 2.0, 2.0]"


def test_three_ranks_can_go_on_after_a_different_call(three: list[dict[str, Any]]) -> None:
    """The rank that differs raises at the first frame of a peer. The frames of its other peers are skipped later."""
    assert [found["after a different call"] for found in three] == [["DisagreementError", "[3.0, 3.0]"] * 3] * 3


def test_a_call_waits_for_the_work_that_was_begun_before(three: list[dict[str, Any]]) -> None:
    """The two would make their collectives in different orders on different ranks otherwise."""
    assert [found["ends"] for found in three] == [["work", "call"]] * 3


def test_calls_of_two_threads_at_once_raise_in_both(three: list[dict[str, Any]]) -> None:
    """Ranks would mix the values of different threads otherwise."""
    told = three[0]["threads"]
    assert len(told) == 2
    assert all(each.startswith("CallError") and "thread 'other' of this rank is not finished" in each for each in told)
    assert [found["threads"] for found in three[1:]] == [["no error"]] * 2


def test_a_slow_rank_gives_a_warning(three: list[dict[str, Any]]) -> None:
    (told,) = three[0]["late"]
    assert "rank 1 is in no collective" in told
    assert three[1]["late"] == []


def test_a_ring_of_waiting_ranks_raises_a_deadlock(three: list[dict[str, Any]]) -> None:
    for found in three:
        assert found["deadlock"].startswith("DeadlockError")
    assert "rank 1 is in barrier() on ranks 1, 2, waiting for 2" in three[0]["deadlock"]


def test_an_ended_and_a_killed_rank_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, (told, *_) = _story(tmp_path, "loss")
    assert status == 128 + 9
    assert told["ended"].startswith("MissingCallError")
    assert "rank 2 ended normally" in told["ended"]
    assert told["killed"].startswith("DeadPeerError")
    assert "rank 1 is dead" in told["killed"]
    assert "rank 1 was killed first, by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variable", "told"),
    [("RANK", "no WORLD_SIZE, MASTER_ADDR"), ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS is 8")],
)
def test_a_process_without_the_address_of_its_peers_raises(
    monkeypatch: pytest.MonkeyPatch, variable: str, told: str
) -> None:
    monkeypatch.setenv(variable, "8")
    with pytest.raises(NoCommunicatorError, match=told):
        init_process()


def test_tasks_of_slurm_have_their_place_without_other_variables() -> None:
    task = {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "1", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    task |= {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "gpu[07,11]", "SLURM_RESTART_COUNT": "2"}
    place = read_rank_address(task)
    assert (place.rank, place.size, place.local_rank, place.host) == (9, 16, 1, "gpu07")
    assert (place.port, place.attempt) == (read_rank_address({**task, "SLURM_PROCID": "0"}).port, "4242.1/2")
    assert 60_999 < place.port < 65_536
    assert read_rank_address({**task, "SLURM_STEP_NUM_NODES": "1"}).loopback
    own = read_rank_address({**task, "MASTER_ADDR": "head", "MASTER_PORT": "7"})
    assert (own.host, own.port, own.rank) == ("head", 7, 9)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "7"}
    assert read_rank_address({**task, **torchrun}) == read_rank_address(torchrun)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    run = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "7", "LOCAL_RANK": "1"}
    for wrong in ("x", "", "-1", "1.0"):
        with pytest.raises(NoCommunicatorError, match=f"a number in the environment variable {name}"):
            read_rank_address({**run, name: wrong})


def test_a_task_of_slurm_that_is_alone_is_the_only_rank() -> None:
    assert read_rank_address({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).size == 1


def test_a_process_started_alone_is_the_only_rank() -> None:
    code = (
        "import torch, meshwright as mw; x = mw.shard_tensor(torch.ones(2), mw.init_mesh(dp=4)); print(x.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2.0\n"


def test_a_simulated_rank_has_its_communicator_already() -> None:
    assert all(simulate(lambda: init_process() is current_communicator(), 2))


def test_parts_that_follow_each_other_in_memory_are_not_copied() -> None:
    """Rows of one tensor are sent from where they are; other parts are copied one after the other."""
    x = torch.arange(12.0).view(4, 3)
    rows = [row.view(-1) for row in x[1:].split([1, 2])]
    assert flat_joined(rows).data_ptr() == rows[0].data_ptr()
    for parts in (rows, rows[::-1], [rows[0]] * 2, [x.t().reshape(-1)], [torch.empty(0)] * 2):
        assert torch.equal(flat_joined(parts), torch.cat(parts))


def test_complex_numbers_travel_as_pairs_of_reals() -> None:
    """Also a single number; the pairs are in the memory of the complex numbers, into which a backend reduces."""
    for shape in ((), (3,), (2, 3), (0,)):
        x = torch.zeros(shape, dtype=torch.complex64)
        pairs = flat(x, "sum")
        assert pairs.dtype == torch.float32
        assert pairs.dim() == flat(x, "prod").dim() == 1
        pairs.add_(1)
        assert torch.equal(x, torch.full(shape, 1 + 1j, dtype=torch.complex64))


def test_ranks_that_compare_other_calls_are_refused_at_the_start() -> None:
    values: dict[str, bytes] = {}
    store = SimpleNamespace(set=lambda key, text: values.update({key: text.encode()}), get=values.get)

    def start(rank: int, every: int) -> None:
        own: Any = SimpleNamespace(rank=rank, _store=store, _guard=SimpleNamespace(check=Check(every=every)))
        ProcessCommunicator.compare_settings(own)

    start(0, 1)
    start(1, 1)
    with pytest.raises(DisagreementError, match="check is 1 on rank 0 and 0 on rank 2"):
        start(2, 0)
