"""The stored output of a notebook is the output of its cells."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from .pages import ROOT


@pytest.mark.skipif(find_spec("nbclient") is None, reason="nbclient is not installed; make setup installs it")
def test_the_notebooks_show_their_real_output() -> None:
    command = [sys.executable, "docs/run_notebook.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"make notebook stores what they print today\n{done.stderr}"
