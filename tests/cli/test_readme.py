"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    exec(example, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == "(8.0, torch.Size([8, 3]))"
    assert "# (8.0, torch.Size([8, 3]))" in example


def test_the_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    for command in set(re.findall(r"`meshwright (\w+)", README)):
        assert main([command, "--help"]) == 0
    assert main(["train", "--processes", "--help"]) == 0
    assert "--processes" in capsys.readouterr().out
