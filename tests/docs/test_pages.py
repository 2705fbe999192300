"""Every page is true: its code runs, its outputs are those shown, its links and names exist."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright as mw

from .pages import ROOT, blocks, run

DOCS = ROOT / "docs"
PAGES = [
    DOCS / "index.md",
    DOCS / "tour.md",
    *sorted((DOCS / "concepts").glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
]
OTHERS = {"how-to/experts.md": ["transformers"], "how-to/quantize.md": ["transformers", "peft"]}
"""Packages that a page's code needs beside our own."""
LONGEST_FROM_SCRATCH = 300
LONGEST_README_PROGRAM = 10


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of transformers, when PEFT calls it
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_output_of_its_code(page: Path) -> None:
    for name in OTHERS.get(f"{page.parent.name}/{page.name}", ()):
        pytest.importorskip(name)
    for block, printed, shown in run(page):
        assert printed == shown, f"{page.name}:{block.line}"


def test_the_readme_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program, shown = (b for b in blocks(ROOT / "README.md") if b.kind in ("python", "text"))
    assert sum(bool(line) for line in program.text.splitlines()) <= LONGEST_README_PROGRAM
    exec(compile(program.text, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed == shown.text
    one, *ranks = printed.split()
    assert ranks == [one] * 4


def test_from_scratch_is_short_and_right() -> None:
    script = DOCS / "from_scratch.py"
    assert len(script.read_text().splitlines()) <= LONGEST_FROM_SCRATCH
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert "64 layouts of one MLP" in done.stdout
    assert "meshwright" not in re.sub(r'"""(?s:.*?)"""|#.*', "", script.read_text())


def errors(root: type[Exception] = mw.MeshwrightError) -> Iterator[type[Exception]]:
    for module in pkgutil.walk_packages(mw.__path__, "meshwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for cls in root.__subclasses__():
        if cls.__module__.startswith("meshwright."):
            yield cls
            yield from errors(cls)


def test_each_error_has_a_paragraph() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    told = set(re.findall(r"^\*\*(\w+)(?:\.\*\*|\*\*)", text, re.MULTILINE))
    assert told == {cls.__name__ for cls in errors()}


def uses_of_errors() -> Iterator[str]:
    """Yield the names of error classes that some call makes, or that a call gets as an argument."""
    for path in (ROOT / "src/meshwright").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                is_test = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
                for each in [node.func, *([] if is_test else node.args)]:
                    yield (
                        each.id if isinstance(each, ast.Name) else each.attr if isinstance(each, ast.Attribute) else ""
                    )


def test_each_error_is_raised_somewhere() -> None:
    used = set(uses_of_errors())
    unused = {cls for cls in errors() if cls.__name__ not in used}
    assert {cls.__name__ for cls in unused if not cls.__subclasses__()} == set()


def test_words_quoted_from_messages_are_in_messages() -> None:
    """Sections that refer to messages in italics use words of the source."""
    sections = re.split(r"^(?=\*\*\w+\.\*\*)", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    source = "".join(path.read_text() for path in sorted((ROOT / "src/meshwright").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", source).lower()
    for section in (each for each in sections if "words in italics refer to the message" in " ".join(each.split())):
        for quoted in re.findall(r"^\* \*([^*]+)\*: ", section, re.MULTILINE):
            parts = [part.strip().lower() for part in re.split("…|,", quoted)]
            assert [part for part in parts if part not in joined] == [], quoted


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_link_targets_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_pages_use_names_that_exist() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        used = set(re.findall(r"\bmw\.(\w+)", page.read_text()))
        assert used <= set(mw.__all__), f"{page.name}: {used - set(mw.__all__)}"
