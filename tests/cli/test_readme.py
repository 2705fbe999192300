"""The commands that the README shows exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_commands_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    for command in set(re.findall(r"`meshwright (\w+)", README)):
        assert main([command, "--help"]) == 0
    assert main(["train", "--processes", "--help"]) == 0
    assert "--processes" in capsys.readouterr().out
