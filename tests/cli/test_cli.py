"""The command line: its options, its messages about mistakes, and its exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import meshwright.comm
from meshwright.cli import main
from meshwright.cli.commands.train import Outcome, report
from meshwright.cli.commands.training_progress import progress, side_by_side
from meshwright.cli.console.parser import AXES, parse
from meshwright.models import AXES as MODEL_AXES
from meshwright.models import Job, LlamaConfig

pytestmark = pytest.mark.usefixtures("forked_processes")

TINY = ["train", "--steps", "3", "--hidden", "32", "--layers", "2", "--batch", "4", "--seq", "16"]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("trian", "meshwright train"),
        ("train --step 3", "train --steps"),
        ("train --rank=4", "train --ranks"),
        ("run --process script.py", "run --processes"),
        ("train --steps 0", "not a positive integer"),
        ("train --mesh ep=2", "AXIS=N"),
        ("train --mesh pp=2 --ranks 2", "not allowed with"),
        ("train --mesh pp=9", "9 pipeline stages"),
        ("train --hidden 33", "33"),
        ("train 5", "no argument 5"),
        ("train --save-every 5", "folder="),
        ("run nowhere.py", "no file nowhere.py"),
        ("run", "SCRIPT"),
        ("schedule", "NAME"),
        ("schedule 1F1B --times 1,-2", "up to four non-negative numbers"),
        ("schedule 1F1B --chunks 3", "takes no --chunks"),
        ("--steps 3", "--steps"),
    ],
)
def test_unknown_arguments_give_a_message(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert "fix:" in error


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_the_defaults_of_train_are_those_of_the_main_job() -> None:
    settings = parse(["train"])
    model = LlamaConfig.of_width(settings.hidden, settings.layers)
    assert Job(model, Job().mesh, settings.steps, settings.batch, settings.seq, settings.seed) == Job()
    assert settings.microbatches == Job().microbatches
    assert AXES == MODEL_AXES


def test_a_script_runs_on_each_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, meshwright as mw\n"
        "if __name__ == '__main__':\n"
        "    sys.stdout.write(f'{mw.get_rank()} {sys.argv[1:]} {beside.x}\\n')\n"
    )
    (tmp_path / "beside.py").write_text("x = 'here'")
    assert main(["run", "--ranks", "3", "--all-ranks", str(script), "--ranks", "x"]) == 0
    assert capfd.readouterr().out.splitlines() == [f"[{rank}] {rank} ['--ranks', 'x'] here" for rank in range(3)]


def test_output_is_that_of_rank_0_or_of_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    for communicator in ([], ["--processes"]):
        assert main(["run", *communicator, str(script)]) == 0
        assert capfd.readouterr().out.splitlines() == ["here"]
        assert main(["run", *communicator, "--all-ranks", str(script)]) == 0
        assert sorted(capfd.readouterr().out.splitlines()) == ["[0] here", "[1] here"]


TRACED = """
import sys, torch, meshwright as mw
torch.manual_seed(0)
mesh = mw.ProcessMesh([0, 1], ["tp"])
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
net[1].weight = mw.shard_tensor(net[1].weight, mesh, [mw.Shard(1)])
net(torch.ones(2, 4)).sum().backward()
torch.optim.SGD(net.parameters(), lr=0.1).step()
sys.exit(3)
"""


@pytest.mark.parametrize("communicator", [[], ["--processes"]])
def test_a_script_is_traced(communicator: list[str], tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(TRACED)
    assert main(["run", *communicator, "--trace", str(trace), str(script)]) == 3
    events = json.loads(trace.read_text())["traceEvents"]
    for rank in range(2):
        found = {e["name"] for e in events if e["pid"] == rank}
        assert {"forward 0", "forward 1", "backward 0", "update SGD"} <= found
        assert any(name.startswith("All") for name in found)


def test_training_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main([*TINY, "--mesh", "pp=2", "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert any(e["name"].startswith("pipeline F0.0 entry.embed … blocks.0") for e in events)
    assert main([*TINY, "--trace", str(tmp_path / "none" / "trace.json")]) == 2
    assert "No such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('enough')", 1, "enough"),
        ("import meshwright as mw\nif mw.get_rank(): raise KeyError('lost')", 1, "raised on rank 1"),
        ("x = (", 1, "SyntaxError"),
    ],
)
def test_the_exit_code_is_that_of_the_script(
    text: str, code: int, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["run", str(script)]) == code
    assert error in capsys.readouterr().err


def test_processes_run_the_same_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command starts itself again; the tests of `comm` run the processes themselves."""
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(meshwright.comm, "launch", lambda argv, ranks, **_: started.append((argv, ranks)) or 7)
    script = tmp_path / "script.py"
    script.touch()
    run, train = ["run", "--ranks", "3", "--processes", str(script), "x"], [*TINY, "--processes", "--mesh", "dp=4"]
    assert [main(run), main(train)] == [7, 7]
    assert started == [(["-m", "meshwright", *run], 3), (["-m", "meshwright", *train], 4)]


def test_train_prints_both_losses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--mesh", "dp=2"]) == 0
    out = capsys.readouterr().out
    assert "one device" in out
    assert "largest relative difference over 3 steps" in out


def test_train_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--mesh", "dp=2,tp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"pp": 1, "dp": 2, "tp": 2}
    assert len(found["losses"]) == len(found["one_device"]) == 3
    assert found["largest_relative_difference"] <= 1e-4


def test_a_checkpointed_run_resumes_with_the_numbers_of_the_main_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--mesh", "dp=2", "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    folder = str(tmp_path / "run")
    short = [*TINY[:1], "--steps", "2", *TINY[3:]]
    assert main([*short, "--mesh", "pp=2", "--save", folder]) == 0
    assert "steps 1 to 2, loss" in capsys.readouterr().out
    assert main([*TINY, "--mesh", "dp=2,tp=2", "--save", folder, "--log", str(tmp_path / "log"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["begun"], found["stopped"]) == (2, False)
    assert found["losses"] == pytest.approx(losses[2:], rel=1e-6)
    assert [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()] == [
        "start",
        "step",
        "checkpoint",
        "end",
    ]
    assert main([*TINY, "--mesh", "dp=2", "--save", folder]) == 0
    assert "no step after 3" in capsys.readouterr().out


def test_sigterm_ends_a_checkpointed_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright", *TINY[:1], "--steps", "100000", *TINY[3:]]
    log = tmp_path / "log.jsonl"
    with subprocess.Popen([*command, "--mesh", "dp=2", "--save", str(tmp_path)], stdout=subprocess.PIPE) as process:
        while not log.exists() or '"step": 2' not in log.read_text():
            time.sleep(0.1)
            assert process.poll() is None
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"stopped by SIGTERM" in out
    assert len(list(tmp_path.glob("step_*"))) == 1


def test_a_difference_above_the_tolerance_fails(capsys: pytest.CaptureFixture[str]) -> None:
    settings = parse([*TINY, "--mesh", "dp=2", "--tolerance", "1e-9"])
    apart, alike = (Outcome("simulated", {"dp": 2}, 1, [5.0], [5.0], largest, 1.0, 1.0) for largest in (1e-8, 1e-10))
    assert (report(apart, settings), report(alike, settings)) == (1, 0)


def test_progress_and_table_have_the_expected_text() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with progress("8 ranks", 2, 1000, console) as on_step:
        on_step(0, 5.5)
        on_step(1, 4.25)
    console.print(side_by_side(("8 ranks", "one device"), [5.0] * 12, [4.0] * 12))
    text = console.file.getvalue()
    assert all(word in text for word in ("8 ranks", "2/2", "loss 4.2500", "tokens/s", "2.5e-01"))
    assert [f" {step} " in text for step in (1, 11, 12, 5)] == [True, True, True, False]


def test_a_schedule_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, events, table = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.txt"
    assert main(["schedule", "ZB-H1", "--svg", str(picture), "--trace", str(events)]) == 0
    assert "makespan 27, span 27, bubble 11.1 %; holds 4, 4, 4, 4" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    assert json.loads(events.read_text())["traceEvents"]
    assert main(["schedule", "Interleaved 1F1B", "--chunks", "4", "--table"]) == 0
    table.write_text(capsys.readouterr().out)
    assert main(["schedule", str(table), "--json", "--times", "0.25,0.25,0.25"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["makespan"], found["peaks"][0], found["channels"]["in order"]) == (26.25, 19, True)


def test_a_schedule_that_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "a.txt"
    table.write_text("mine: 1 microbatch\nway: 0\n0: BW0.0 F0.0\n")
    assert main(["schedule", str(table)]) == 1
    assert "rank 0 is at BW0.0 and waits for F0.0" in capsys.readouterr().err
    assert main(["schedule", "1F2B"]) == 1
    assert main(["schedule", "list"]) == 0
    assert "ZB-V" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "answer"),
    [("{folder}/no_text", "the byte 0xff at 0"), ("1F1B --svg {folder}/missing/a.svg", "No such folder")],
)
def test_unreadable_or_unwritable_schedule_files_give_a_message(
    line: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_text").write_bytes(b"\xff")
    assert main(["schedule", *(word.format(folder=tmp_path) for word in line.split())]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert "fix:" in error
    assert [path.name for path in tmp_path.iterdir()] == ["no_text"]


def test_the_picture_of_a_schedule_replaces_the_file_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "a.svg"
    asked = ["schedule", "1F1B", "--svg", str(picture)]
    picture.write_text("old")
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", _full_disk)
        assert main(asked) == 2
    assert "No space left" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.svg", "old")]
    assert main(asked) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    assert picture.read_text().startswith("<svg")
    assert picture.read_text().rstrip().endswith("</svg>")


def _full_disk(source: str, target: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
