"""Every example runs as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 100
    told = re.search(r"`meshwright run ([^`]*)`", text)
    words = ["-m", "meshwright", "run", *told[1].split()] if told else []
    found = subprocess.run([sys.executable, *words, str(example)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout
