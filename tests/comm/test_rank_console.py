"""Debugging ranks: a debugger in one of them, and prints with the number of their rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.comm import current_communicator, prefix_prints, simulate
from meshwright.comm.launcher.rank_console import KeptLines, first_rank_prints, in_debugger
from meshwright.comm.transport.control_links import RankState

SIMULATED = """
import meshwright as mw
from meshwright.comm import current_communicator

def program():
    here = current_communicator()
    if here.rank == 1:
        breakpoint()
    here.barrier((0, 1, 2))
    return here.rank

print(mw.simulate(program, 3))
"""
PROCESSES = """
import sys, time, warnings
from meshwright.comm import Check, init_process
from meshwright.comm.launcher.rank_console import in_debugger

warnings.simplefilter("ignore")
here = init_process(check=Check(limit=0.3, patience=0.6))
here.barrier((0, 1))
if here.rank == 0:
    assert not in_debugger()
    breakpoint()
here.barrier((0, 1))
print("done")
"""


def test_a_breakpoint_in_a_simulated_rank_opens_a_prompt_while_others_wait(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SIMULATED)
    typed = "p 'rank', mw.get_rank()\nnext\nc\n"
    done = subprocess.run(
        [sys.executable, str(script)], input=typed, capture_output=True, text=True, timeout=60, check=False
    )
    assert "('rank', 1)" in done.stdout
    assert done.stdout.rstrip().endswith("[0, 1, 2]")
    assert done.returncode == 0, done.stderr


def test_other_ranks_wait_for_a_debugger_beyond_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    started = [sys.executable, "-m", "meshwright", "run", "--ranks", "2", "--processes", str(script)]
    with subprocess.Popen(
        started,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONBREAKPOINT": "pdb.set_trace"},
    ) as process:
        assert process.stdin is not None
        process.stdin.write("import time; time.sleep(2.5)\nc\n")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "(Pdb)" in out
    assert "done" in out


def test_a_rank_in_a_debugger_is_reported() -> None:
    assert not in_debugger()
    assert str(RankState("", (), 3, debugged=True)) == "is stopped in a debugger after 3 calls"


def test_prints_begin_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        print("one", current_communicator().rank, end="")
        current_communicator().barrier((0, 1))
        print(" two\nthree")
        current_communicator().barrier((0, 1))
        print("left", end="")

    with prefix_prints():
        print("outside")
        simulate(program, 2)
    print("\nafter")
    found = capsys.readouterr().out.splitlines()
    assert sorted(found) == sorted(
        [
            "outside",
            "[0] one 0 two",
            "[0] three",
            "[1] one 1 two",
            "[1] three",
            "[0] left",
            "[1] left",
            "after",
        ]
    )
    assert (found[0], found[-1]) == ("outside", "after")


def test_a_prompt_is_shown_before_its_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> list[str]:
        print("continue? ", end="", flush=True)
        first = capsys.readouterr().out
        print("yes")
        return [first, capsys.readouterr().out]

    with prefix_prints():
        assert simulate(program, 1) == [["[0] continue? ", "yes\n"]]


def test_a_script_runs_with_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    assert main(["run", "--all-ranks", str(script)]) == 0
    assert capsys.readouterr().out.splitlines() == ["[0] here", "[1] here"]


def test_output_of_the_first_rank_is_shown_and_that_of_others_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    kept = KeptLines()
    with first_rank_prints(kept):
        simulate(lambda: print("here", current_communicator().rank), 2)
    assert capsys.readouterr().out == "here 0\n"
    kept.show([1])
    assert capsys.readouterr().err == "[1] here 1\n"
