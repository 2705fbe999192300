"""The site: built strictly, complete, and without anything from a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import meshwright as mw

from .pages import ROOT

DOCS = ROOT / "docs"
PACKAGES = sorted(path.parent.name for path in (ROOT / "src/meshwright").glob("*/__init__.py"))
NO_REFERENCE = {"cli"}  # commands: `meshwright --help`
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}

needs_mkdocs = pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; make setup installs it")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


class Page(HTMLParser):
    """The resources of a page, and the targets of its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") in ("canonical", "prev", "next"):
            return
        self.loads += [to for to in [found.get(LOADED.get(tag, ""))] if to]
        self.links += [to for to in [found.get("href")] if tag == "a" and to]
        self.names |= {name for name in [found.get("id")] if name}


@needs_mkdocs
def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [to for to in Page(path.read_text()).loads if re.match(r"(?:\w+:)?//", to)] == [], path.name
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", path.read_text()) == [], path.name


@needs_mkdocs
def test_every_page_link_and_picture_is_on_the_site(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    sources = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert {path.relative_to(DOCS).with_suffix(".html") for path in sources} <= {
        path.relative_to(site) for path in pages
    }
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            to, _, name = link.partition("#")
            if re.match(r"\w+:", to):
                continue
            target = (path.parent / to).resolve() if to else path
            assert target.exists(), f"{path.name}: {link}"
            assert not name or target not in pages or name in pages[target].names, f"{path.name}: {link}"


@needs_mkdocs
def test_every_page_is_in_the_nav(site: Path) -> None:
    led = {(site / link.partition("#")[0]).resolve() for link in Page((site / "index.html").read_text()).links}
    pages = {path for path in site.rglob("*.html") if path.name != "404.html"}
    assert {path.relative_to(site) for path in pages - led if "source" not in path.parts} == set()


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    named = re.findall(r"^::: meshwright\.(?:engine\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(set(mw.__all__) - set(named)) == [], "a page of docs/reference has `::: meshwright.NAME` for each"
    assert sorted(named) == sorted(mw.__all__), "each name once, and no others"


def test_the_reference_has_every_package() -> None:
    told = {path.stem for path in (DOCS / "reference/packages").glob("*.md")}
    assert told == set(PACKAGES) - NO_REFERENCE


@needs_mkdocs
def test_the_reference_has_the_api_of_every_package(site: Path) -> None:
    for package in sorted(set(PACKAGES) - NO_REFERENCE):
        told = Page((site / f"reference/packages/{package}.html").read_text()).names
        given = {name for name in import_module(f"meshwright.{package}").__all__ if name not in mw.__all__}
        assert {name for name in given if f"meshwright.{package}.{name}" not in told} == set(), package
