"""`meshwright run`: a script has the same environment as under plain Python, and a failed rank shows its output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import main

pytestmark = pytest.mark.usefixtures("forked_processes")

COMMUNICATORS = [[], ["--processes"]]
FAILS = """
import sys
import meshwright as mw
print("begun", mw.get_rank())
if mw.get_rank() == 1:
    print("about to fail", file=sys.stderr)
    {}
"""
SELF = """
from __future__ import annotations
import inspect, io, pickle, typing
from dataclasses import dataclass
import torch
from torch.utils.data import DataLoader, Dataset
import __main__
import meshwright as mw
from meshwright.comm import current_communicator

@dataclass
class Arguments:
    inner: Inner | None = None

@dataclass
class Inner:
    x: int = 0

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, at):
        return torch.tensor(at)

class Net(torch.nn.Linear):
    pass

if __name__ == "__main__":
    __main__.rank = mw.get_rank()
    assert typing.get_type_hints(Arguments) == {"inner": Inner | None}
    assert type(pickle.loads(pickle.dumps(Arguments()))) is Arguments is __main__.Arguments
    assert vars(__main__)["Arguments"] is Arguments
    assert inspect.getsource(Net).startswith("class Net")
    torch.save(Net(2, 2), saved := io.BytesIO())
    saved.seek(0)
    assert type(torch.load(saved, weights_only=False)) is Net
    if mw.get_rank() == 0:
        assert [x.item() for x in DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")] == [0, 1, 2, 3]
    current_communicator().barrier((0, 1))
    assert rank == mw.get_rank()
    print(__file__)
"""


def script_of(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("raise KeyError('lost')", 1, "KeyError: 'lost'"), ("sys.exit('enough')", 1, "enough"), ("sys.exit(7)", 7, "")],
)
def test_a_failed_rank_shows_its_output(
    how: str, code: int, said: str, communicator: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = "2" if communicator else "3"
    assert main(["run", "--ranks", ranks, *communicator, script_of(tmp_path, FAILS.format(how))]) == code
    found = capfd.readouterr()
    assert found.out.splitlines() == ["begun 0"]
    assert {"[1] begun 1", "[1] about to fail"} <= {*found.err.splitlines()}
    assert said in found.err
    assert communicator or "[2]" not in found.err


def test_the_traceback_of_an_error_begins_in_the_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", script_of(tmp_path, FAILS.format("raise KeyError('lost')"))]) == 1
    assert "_simulated.py" not in capfd.readouterr().err


def test_all_ranks_of_a_deadlock_show_their_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = "mw.shard_tensor(__import__('torch').ones(4), mw.init_mesh(dp=-1), [mw.Shard(0)]).sum().item()"
    assert main(["run", "--ranks", "3", script_of(tmp_path, FAILS.format(alone))]) == 1
    error = capfd.readouterr().err
    assert "rank 1 waits in all_reduce" in error
    assert "[1] begun 1" in error
    assert "[2] begun 2" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_script_is_the_main_module(
    communicator: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sys.modules["__main__"]
    script = script_of(tmp_path, SELF)
    assert main(["run", "--ranks", "2", *communicator, script]) == 0, capfd.readouterr().err
    assert capfd.readouterr().out.splitlines() == [script]
    assert sys.modules["__main__"] is before


def test_a_prompt_of_another_rank_is_shown(tmp_path: Path) -> None:
    text = "import sys, meshwright as mw\nsys.stdout.reconfigure(line_buffering=True)\n"
    script = script_of(tmp_path, text + "if mw.get_rank() == 1: breakpoint()\nprint('done', mw.get_rank())")
    found = subprocess.run(
        [sys.executable, "-m", "meshwright", "run", script],
        input="p 'rank', mw.get_rank()\nc\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "('rank', 1)" in found.stdout
    assert "done 0" in found.stdout
    assert "done 1" not in found.stdout
