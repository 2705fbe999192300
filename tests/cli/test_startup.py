"""Commands that do not need torch do not import it, and packages import their names at the first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.layout._lazy_names import imports_for_type_checkers

WITHOUT_TORCH = """
import sys
import meshwright as mw
from meshwright.cli import main
from meshwright.cli.console.parser import COMMANDS

folder = sys.argv[1]
for command in COMMANDS:
    assert main([command, "--help"]) == 0
assert main(["--help"]) == 0
assert main(["schedule", "list"]) == 0
assert main(["schedule", "ZB-V", "--json"]) == 0
assert main(["schedule", "1F1B", "--svg", f"{folder}/a.svg", "--trace", f"{folder}/a.json"]) == 0
assert main(["trian"]) == 2
mw.ProcessMesh([0, 1], ["x"]), mw.Shard(0), mw.Replicate(), mw.Partial()
loaded = {"torch", "sympy"} & set(sys.modules)
assert not loaded, loaded
"""


def test_help_and_schedules_do_not_import_torch(tmp_path: Path) -> None:
    line = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    found = subprocess.run(line, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    words = ("train", "run", "exit codes", "--processes", "convert PATH NEW", "--html", "makespan")
    assert [word for word in words if word not in found.stdout] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.svg"]


@pytest.mark.parametrize("name", ["layout", "pipeline", "search"])
def test_a_package_imports_its_names_at_the_first_use(name: str) -> None:
    package = import_module(f"meshwright.{name}")
    origins = dict(imports_for_type_checkers(package))
    assert set(package.__all__) - set(origins) <= {"lazy_names"}
    for public, (module, original) in origins.items():
        assert getattr(package, public) is getattr(import_module(module), original)
    with pytest.raises(AttributeError, match=f"'meshwright.{name}' has no attribute 'Shrad'"):
        _ = package.Shrad


def test_errors_are_names_of_the_api() -> None:
    assert mw.PickleError is mw.errors.PickleError
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = mw.NoSuchError
