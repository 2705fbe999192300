"""`--config`: options of a command from TOML or from a function; the command line overrides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.console.parser import parse

MODULE = """
from dataclasses import dataclass, field
import meshwright.models

@dataclass
class Mine:
    steps: int = 50
    mesh: str = "dp=2"
    hidden: int = 64

def mine():
    return Mine(steps=7, mesh="tp=2")

def job():
    return meshwright.models.Job(mesh=(1, 4, 1), steps=9, sequence=32)

def mapping():
    return {"batch": 8, "processes": True}

def rate():
    return meshwright.models.Job(learning_rate=0.1)

def fails():
    return 1 / 0

def number():
    return 5
"""


def written(folder: Path, text: str) -> str:
    path = folder / "a.toml"
    path.write_text(text)
    return str(path)


def test_the_command_line_overrides_the_options_of_a_file(tmp_path: Path) -> None:
    file = written(tmp_path, "steps = 7\nsave-every = 2\ntolerance = 0.5\nprocesses = true\nmesh = {dp=2, tp=2}")
    settings = parse(["train", "--config", file])
    assert (settings.steps, settings.save_every, settings.tolerance, settings.mesh) == (7, 2, 0.5, (1, 2, 2))
    assert settings.processes
    assert settings.batch == 16
    settings = parse(["train", f"--config={file}", "--steps", "3", "--no-processes", "--ranks", "2"])
    assert (settings.steps, settings.processes, settings.mesh, settings.ranks) == (3, False, None, 2)


def test_the_file_may_have_required_options_and_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(
        tmp_path, 'model = "config.json"\ncluster = "8xH100"\nbatch = 8\nsequence = 64\n[given]\ntp = 2\nzero = 1\n'
    )
    settings = parse(["plan", "--config", file])
    assert (settings.model, settings.cluster, settings.batch, settings.sequence) == ("config.json", "8xH100", 8, 64)
    assert settings.given == {"tp": 2, "zero": 1}
    assert parse(["plan", "other.json", "--config", file, "--batch", "4"]).model == "other.json"
    assert main(["plan", "--config", written(tmp_path, 'model = "c"\ncluster = "8xH100"\nbatch = 8\n')]) == 2
    assert "without --sequence" in capsys.readouterr().err


def test_a_function_returns_a_dataclass_or_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    settings = parse(["train", "--config", f"{path}:mine"])
    assert (settings.steps, settings.mesh, settings.hidden) == (7, (1, 1, 2), 256)
    settings = parse(["train", "--config", f"{path}:job"])
    assert (settings.steps, settings.mesh, settings.seq) == (9, (1, 4, 1), 32)
    settings = parse(["train", "--config", f"{path}:mapping", "--batch", "4"])
    assert (settings.batch, settings.processes) == (4, True)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("step = 3", "fix: write steps"),
        ("steps = 0", "steps = 0: 0 is not a positive integer"),
        ('steps = "many"', "not a positive integer"),
        ("steps = 2.5", "not a positive integer"),
        ("processes = 1", "processes = true, or false"),
        ('mesh = "ep=2"', "AXIS=N"),
        ("mesh = [2, 2]", "AXIS=N"),
        ('mesh = "dp=2"\nranks = 4', "not allowed with --ranks"),
        ("steps = ", "lines of TOML"),
        ("help = true", "there is no option help"),
        ('config = "b.toml"', "there is no option config"),
    ],
)
def test_mistakes_in_a_file_give_a_message(
    text: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", written(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert "a.toml" in error
    assert "fix:" in error


@pytest.mark.parametrize(
    ("source", "code", "answer"),
    [
        ("nowhere.toml", 2, "No such file"),
        ("nowhere.py:f", 2, "there is no such file"),
        ("{path}:min", 2, "mine.py:mine"),
        ("{path}:number", 2, "returns a int"),
        ("{path}:rate", 2, "no option learning_rate"),
        ("{path}:fails", 1, "raised ZeroDivisionError at {path}:24"),
    ],
)
def test_a_source_without_options_gives_a_message(
    source: str, code: int, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    assert main(["train", "--config", source.format(path=path)]) == code
    assert answer.format(path=path) in capsys.readouterr().err
