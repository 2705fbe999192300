"""What `make docs` adds to the pages: the nav, a page for each source file that a page links to, and the notebooks."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
SOURCE = "source"
"""Where the site keeps the pages of files that lie outside docs/."""
# What comes first in each section, in this order; other pages follow by name.
FIRST = {
    ".": "index tour troubleshooting glossary conventions questions matrix",
    "concepts": "layout rule reshard comm parallelize randomness context checkpoint static passes rewrite "
    "transforms pipeline schedules plans escapes",
    "how-to": "from-ddp from-fsdp from-dtensor from-megatron from-deepspeed from-paddle "
    "train-and-resume save-a-program",
    "reference": "index",
    "design": "2026-11-eager-core 2026-11-static-mode 2026-11-pipeline 2026-11-cost-model 2026-11-checkpoint",
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)(?P<to>[^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    config.nav = nav()


def nav() -> list[Any]:
    """The nav, from the pages that there are."""
    front, tour, *others = section(".")
    return [
        {"Meshwright": front},
        {"Tour": [tour, *(page_of(path) for path in NOTEBOOKS)]},
        {"Concepts": section("concepts")},
        {"How-to": section("how-to")},
        {"Reference": [*section("reference"), {"Rooms": section("reference/rooms")}]},
        *others,
        {"Design notes": section("design")},
    ]


def section(folder: str) -> list[str]:
    """The pages of a folder: those that come first, then the others by name."""
    first = FIRST.get(folder, "").split()
    found = {path.stem for path in (DOCS / folder).glob("*.md")}
    stems = [*(stem for stem in first if stem in found), *sorted(found - {*first})]
    return [(PurePosixPath(folder) / f"{stem}.md").as_posix() for stem in stems]


def page_of(path: Path) -> str:
    """Where the site shows a file of the repository."""
    if path.is_relative_to(DOCS) and path.suffix in (".md", ".ipynb", ".svg", ".png"):
        return path.relative_to(DOCS).with_suffix(".md" if path.suffix == ".ipynb" else path.suffix).as_posix()
    return f"{SOURCE}/{path.relative_to(ROOT).as_posix()}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from files which are no pages."""
    for notebook in NOTEBOOKS:
        for name, text in notebook_page(notebook).items():
            files.append(File.generated(config, name, content=text))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    waiting = {path for page in pages for path in sources(origin(page), page.content_string)}
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(page_of(path)) is None:
            text = source_page(path)
            files.append(File.generated(config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
            waiting |= sources(path, text)
    return files


def origin(file: File) -> Path:
    """The file of the repository that a page shows."""
    if file.src_uri.startswith(f"{SOURCE}/"):
        return ROOT / file.src_uri.removeprefix(f"{SOURCE}/").removesuffix(".md")
    path = DOCS / file.src_uri
    return path if path.exists() else path.with_suffix(".ipynb")


def sources(page: Path, text: str) -> set[Path]:
    """The files that a page links to and that the site would not have."""
    led = {leads(page, found["to"]) for found in _LINK.finditer(text)}
    return {path for path in led if path.exists() and page_of(path).startswith(f"{SOURCE}/")}


def leads(page: Path, link: str) -> Path:
    return Path(os.path.normpath(page.parent / link))


def source_page(path: Path) -> str:
    """The page of a file or a folder of the repository."""
    if path.suffix == ".md":
        return path.read_text()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".py", ".md", ".toml"))
        return f"# `{name}`\n\n" + "\n".join(f"* [{n}]({n})" for n in inside) + "\n"
    kind = "python" if path.suffix == ".py" else "text"
    return f"# `{name}`\n\n````{kind}\n{path.read_text().rstrip()}\n````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads the links of the repository to where the site shows their files."""
    here = origin(page.file)

    def led(found: re.Match[str]) -> str:
        path = leads(here, found["to"])
        if not path.exists():
            return found[0]
        return os.path.relpath(page_of(path), PurePosixPath(page.file.src_uri).parent)

    return _LINK.sub(led, markdown)


def notebook_page(path: Path) -> dict[str, str]:
    """A notebook as a page, and the pictures that it shows."""
    cells, files = [], {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            cells.append(cell.source)
            continue
        cells.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            picture = output.get("data", {}).get("image/svg+xml")
            if picture:
                name = path.with_name(f"{path.stem}-{len(files) + 1}.svg")
                files[name.relative_to(DOCS).as_posix()] = picture
                cells.append(f"![]({name.name})")
            else:
                cells.append(f"```text\n{text_of(output).rstrip()}\n```")
    return {page_of(path): "\n\n".join(cells) + "\n", **files}


def text_of(output: Any) -> str:
    """What an output of a cell says in text."""
    return output.text if output.output_type == "stream" else output.data["text/plain"]
