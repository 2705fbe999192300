"""Every command with a mistake: the right exit code, one message with a remedy, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cli import LINES, Line, fault_of, make_files, process_faults
from meshwright.cli.console.parser import COMMANDS

pytestmark = pytest.mark.usefixtures("forked_processes")

FEWEST = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("lines")
    make_files(found)
    return found


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.text)
def test_each_line_gets_one_clear_message(line: Line, folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert fault_of(line, folder) == ""
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        name for name in before if name != "__pycache__"
    ]


def test_lines_as_processes_get_the_same_messages(folder: Path) -> None:
    assert list(process_faults(folder)) == []


def test_every_command_has_bad_lines() -> None:
    assert len(LINES) >= FEWEST
    for command in COMMANDS:
        assert sum(line.text.split()[0] == command for line in LINES) >= 3, command
