"""Standard output that cannot be written: a closed pipe, or a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LINES = ("schedule list", "schedule 1F1B --json", "run many.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "many.py").write_text("for number in range(100_000):\n    print(number)\n")
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_a_full_disk_gives_one_line(line: str, folder: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "meshwright", *line.split()]
        done = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
    assert done.stderr.count("fix:") == 1


def test_a_closed_output_pipe_ends_the_script(folder: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "run", "many.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_os_errors_of_a_script_are_shown_unchanged(folder: Path) -> None:
    (folder / "fails.py").write_text("raise BrokenPipeError(32, 'of the script')\n")
    command = [sys.executable, "-m", "meshwright", "run", "fails.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of the script" in done.stderr


def test_checkpoint_commands_end_silently_on_a_closed_pipe(tmp_path: Path) -> None:
    save_file({f"layer.{number}.weight": torch.zeros(1) for number in range(5000)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-m", "meshwright", "checkpoint", "inspect", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
