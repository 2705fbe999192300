"""Every example runs as its first lines describe, and prints on its ranks the output of one device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import main

pytestmark = pytest.mark.usefixtures("forked_processes")

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PARALLEL = [path for path in EXAMPLES if "import meshwright" in path.read_text()]
PLAIN = "mlp_by_marks"
WORDS = {"grpo": [["2"], ["3", "apart"]]}
"""Name of an example → arguments other than a folder, with which it takes less time or does something else."""
RUNS = [(path, words) for path in PARALLEL for words in WORDS.get(path.stem, [[]])]
LONGEST = 100


def numbers(text: str) -> list[list[float]]:
    return [[float(n) for n in re.findall(r"-?\d+\.?\d*", line)] for line in text.splitlines()]


def ranks_of(example: Path) -> int:
    found = re.search(r"`meshwright run --ranks (\d+)`", example.read_text())
    assert found
    return int(found[1])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < LONGEST


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("example", "words"), RUNS, ids=["-".join([path.stem, *words]) for path, words in RUNS])
def test_an_example_prints_on_ranks_the_output_of_one_device(
    example: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in re.findall(r"^from (transformers|diffusers)", example.read_text(), re.MULTILINE):
        pytest.importorskip(library)
    shown: list[list[list[float]]] = []
    for ranks in (1, ranks_of(example)):
        code = main(
            ["run", "--all-ranks", "--ranks", str(ranks), str(example), *(words or [str(tmp_path / f"{ranks}")])]
        )
        told = capsys.readouterr()
        assert code == 0, told.err[-2000:]
        shown.append(numbers(re.sub(r"^\[\d+\] ", "", told.out, flags=re.MULTILINE))[::ranks])
    one, many = shown
    assert one
    assert len(one) == len(many)
    assert all(row == pytest.approx(other, abs=2e-4) for row, other in zip(one, many, strict=True))


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path not in PARALLEL or path.stem == PLAIN])
def test_plain_python_runs_on_one_device(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_torchrun_starts_it_too() -> None:
    script = next(str(path) for path in EXAMPLES if path.stem == PLAIN)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = sorted(re.findall(r"\d\.\d{5}", done.stdout))  # lines of two processes may run into each other
    assert losses
    assert losses[::2] == losses[1::2]
