"""docs/architecture.md is true: the diagram shows the layers, names exist, and walks have the order of the calls."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

import meshwright as mw
from tests.test_layers import LAYERS, SUBPACKAGES

from .pages import ROOT, blocks

PAGE = ROOT / "docs" / "architecture.md"
NAMES = re.compile(rf"`((?:{'|'.join(sorted(name for layer in LAYERS for name in layer))})\.[\w.]+)`")
"""Names of modules, classes and functions below `meshwright`."""
STEP = re.compile(r"^(\d+)\. `([\w.]+)`", re.MULTILINE)
FEWEST_STEPS = 10
READ_FIRST = 3


def sections(level: int) -> dict[str, str]:
    """Return the texts below the headings of a level, by heading."""
    parts = re.split(rf"^{'#' * level} (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    ends = f"^{'#' * (level - 1)} "
    texts = (re.split(ends, text, maxsplit=1, flags=re.MULTILINE)[0] if level > 2 else text for text in parts[2::2])
    return dict(zip(parts[1::2], texts, strict=True))


def walks() -> dict[str, str]:
    return {title: text for title, text in sections(2).items() if title.startswith("Walk")}


def found(name: str) -> Any:
    """Return the object of this name below `meshwright`: a module, class, function or table, or an attribute as stored.

    Raises:
        AttributeError: there is none.
    """
    parts, at = name.split("."), 0
    thing: Any = mw
    while at < len(parts) and isinstance(thing, ModuleType):
        path = ".".join(["meshwright", *parts[: at + 1]])
        thing = import_module(path) if _is_module(path) else getattr(thing, parts[at])
        at += 1
    for part in parts[at:]:
        thing = inspect.getattr_static(thing, part)
    return thing


def _is_module(path: str) -> bool:
    """True for a module, unless its package exports an object with the name of the module."""
    package, _, name = path.rpartition(".")
    exported = vars(import_module(package)).get(name)
    return (exported is None or isinstance(exported, ModuleType)) and find_spec(path) is not None


def code_of(name: str) -> CodeType:
    """Return the code that runs when a function is called, or an object of a class is made."""
    thing: Any = found(name)
    if isinstance(thing, type):
        thing = thing.__init__
    elif isinstance(thing, property):
        thing = thing.fget
    elif isinstance(thing, cached_property):
        thing = thing.func
    elif isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    function: Any = thing
    return inspect.unwrap(function).__code__


def calls(program: Callable[[], Any], codes: frozenset[CodeType]) -> list[CodeType]:
    """Run the program, and return which of these functions the thread called, in order."""
    seen: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            seen.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        program()
    finally:
        sys.setprofile(before)
    return seen


def not_in_order(steps: list[str], seen: list[CodeType]) -> Iterator[str]:
    """Yield the first step that is not called after the step before it."""
    rest = iter(seen)
    for number, name in enumerate(steps, 1):
        code = code_of(name)
        if not any(code is each for each in rest):
            yield f"{number}. {name} is not called here"
            return


@cache
def programs() -> dict[str, Any]:
    """Return the names that the code of the page defines; calls of the examples are left out."""
    names: dict[str, Any] = {}
    for block in blocks(PAGE):
        if block.kind == "python":
            text = "\n".join(block.text.splitlines()[:-1])
            exec(compile(text, str(PAGE), "exec", dont_inherit=True), names)
    return names


def test_the_diagram_shows_the_layers() -> None:
    diagram, *others = (block.text for block in blocks(PAGE) if block.kind == "text")
    rows = re.findall(r"^│ +(\d+) │ ([a-z_ ]+?) +│", diagram, re.MULTILINE)
    assert not others
    assert [(int(number), set(names.split())) for number, names in rows] == list(enumerate(LAYERS))[::-1]


def test_each_package_has_a_paragraph() -> None:
    packages = [name for layer in LAYERS for name in layer]
    assert sorted(sections(3)) == sorted(packages)
    order = [next(n for n, layer in enumerate(LAYERS) if title in layer) for title in sections(3)]
    assert order == sorted(order), "the lowest layer first"


@pytest.mark.parametrize("package", [name for layer in LAYERS for name in sorted(layer)])
def test_a_paragraph_has_the_subpackages_and_what_to_read_first(package: str) -> None:
    text = " ".join(sections(3)[package].split())
    listed = re.search(r"Subpackages(?:, lowest first)?: ([^.]*)\.", text)
    assert listed is not None
    assert re.findall(r"`(\w+)`", listed[1]) == SUBPACKAGES.get(package, [])
    assert "not" in text[: listed.start()], "the paragraph says what the package does not know"
    assert len(NAMES.findall(text.partition("Read first: ")[2])) == READ_FIRST


def test_each_name_exists() -> None:
    names = sorted(set(NAMES.findall(PAGE.read_text())))
    missing: list[str] = []
    for name in names:
        try:
            found(name)
        except AttributeError as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)


def test_each_step_names_a_function() -> None:
    for title, text in walks().items():
        steps = STEP.findall(text)
        assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1)), title
        assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == len(steps) >= FEWEST_STEPS, title
        assert all(code_of(name) for _, name in steps), title


@pytest.mark.parametrize(
    ("walk", "program", "ranks"), [("Walk 1", "placement", 2), ("Walk 2", "training", 2), ("Walk 3", "choice", 0)]
)
def test_a_walk_is_in_the_order_of_the_calls(
    walk: str, program: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROGRAMS", "off")  # a stored program would not be recorded
    (text,) = (text for title, text in walks().items() if title.startswith(walk))
    steps, run = [name for _, name in STEP.findall(text)], programs()[program]
    codes = frozenset(map(code_of, steps))
    seen = mw.simulate(lambda: calls(run, codes), ranks)[0] if ranks else calls(run, codes)
    assert not list(not_in_order(steps, seen))


def test_a_wrong_order_is_found() -> None:
    codes = [code_of(name) for name in ("reshard.plan", "reshard.execute")]
    assert not list(not_in_order(["reshard.plan", "reshard.execute"], codes))
    assert list(not_in_order(["reshard.execute", "reshard.plan"], codes)) == ["2. reshard.plan is not called here"]


def test_a_missing_name_is_found() -> None:
    for name in ("graph.nowhere.capture", "tensor.core.dist_tensor.DistTensor.nowhere", "spmd.rules.nowhere"):
        with pytest.raises(AttributeError):
            found(name)
