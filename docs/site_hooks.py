"""Hooks of `make docs`: the navigation, a page for each source file that a page links to, and the notebooks."""

from __future__ import annotations

import os
import re
import tomllib
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
"""Folder of the site for the pages of files outside docs/."""
NAV = {
    "Start": "tour notebooks/tutorial glossary",
    "Make a model parallel": "concepts/parallelize concepts/plans concepts/pipeline concepts/schedules "
    "concepts/context concepts/experts how-to/experts",
    "Train and resume": "how-to/train-and-resume concepts/precision concepts/checkpoint concepts/randomness "
    "concepts/same_numbers",
    "Generate and quantize": "how-to/generate how-to/quantize how-to/train-in-low-precision",
    "Train fast": "concepts/static how-to/save-a-program concepts/passes concepts/overlap how-to/trace",
    "Run on machines": "how-to/launch how-to/run-on-gpus how-to/command-line",
    "Find and handle errors": "troubleshooting how-to/debug concepts/checks how-to/faults",
    "Move from another library": "conventions how-to/from-ddp how-to/from-fsdp how-to/from-dtensor "
    "how-to/from-megatron how-to/from-deepspeed how-to/from-paddle",
    "Understand": "concepts/layout concepts/rule concepts/reshard concepts/comm concepts/transforms concepts/escapes",
    "Extend": "architecture questions how-to/add-a-rule how-to/add-a-pass concepts/rewrite how-to/add-a-schedule "
    "how-to/bring-your-device",
    "Status": "figures matrix",
}
"""The navigation: a section for each task, with its pages in order."""
FOLDERS = ("concepts", "how-to", ".")
"""Folders whose pages `NAV` places; a page that it does not name follows under "More"."""
FIRST = {
    "reference": "index",
    "design": "2026-11-eager-core 2026-11-static-mode 2026-11-pipeline 2026-11-cost-model 2026-11-checkpoint",
}
"""The pages that come first in a section of a folder, in this order; the other pages follow by name."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)(?P<to>[^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    config.site_name = f"{config.site_name} {version()}"
    config.nav = nav()


def version() -> str:
    """Return the version of the library."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def nav() -> list[Any]:
    """Return the navigation: tasks, then the reference and the design notes."""
    tasks = {title: [f"{name}.md" for name in names.split()] for title, names in NAV.items()}
    placed = {"index.md"}.union(*tasks.values())
    others = [page for folder in FOLDERS for page in section(folder) if page not in placed]
    return [
        {"Meshwright": "index.md"},
        *({title: pages} for title, pages in tasks.items()),
        {"Reference": [*section("reference"), {"Packages": section("reference/packages")}]},
        {"Design notes": section("design")},
        *([{"More": others}] if others else []),
    ]


def section(folder: str) -> list[str]:
    """Return the pages of a folder: the first ones in order, then the others by name."""
    first = FIRST.get(folder, "").split()
    found = {path.stem for path in (DOCS / folder).glob("*.md")}
    stems = [*(stem for stem in first if stem in found), *sorted(found - {*first})]
    return [(PurePosixPath(folder) / f"{stem}.md").as_posix() for stem in stems]


def page_of(path: Path) -> str:
    """Return the page of the site that shows a file of the repository."""
    if path.is_relative_to(DOCS) and path.suffix in (".md", ".ipynb", ".svg", ".png"):
        return path.relative_to(DOCS).with_suffix(".md" if path.suffix == ".ipynb" else path.suffix).as_posix()
    return f"{SOURCE}/{path.relative_to(ROOT).as_posix()}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
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
    """Return the file of the repository that a page shows."""
    if file.src_uri.startswith(f"{SOURCE}/"):
        return ROOT / file.src_uri.removeprefix(f"{SOURCE}/").removesuffix(".md")
    path = DOCS / file.src_uri
    return path if path.exists() else path.with_suffix(".ipynb")


def sources(page: Path, text: str) -> set[Path]:
    """Return the files that a page links to and that have no page yet."""
    led = {leads(page, found["to"]) for found in _LINK.finditer(text)}
    return {path for path in led if path.exists() and page_of(path).startswith(f"{SOURCE}/")}


def leads(page: Path, link: str) -> Path:
    return Path(os.path.normpath(page.parent / link))


def source_page(path: Path) -> str:
    """Return the text of the page of a file or a folder of the repository."""
    if path.suffix == ".md":
        return path.read_text()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".py", ".md", ".toml"))
        return f"# `{name}`\n\n" + "\n".join(f"* [{n}]({n})" for n in inside) + "\n"
    kind = "python" if path.suffix == ".py" else "text"
    return f"# `{name}`\n\n````{kind}\n{path.read_text().rstrip()}\n````\n"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Give a page without sections the width of the table of contents."""
    if not any(title.children for title in page.toc):
        page.meta.setdefault("hide", []).append("toc")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its links to files of the repository replaced by links to their pages."""
    here = origin(page.file)

    def led(found: re.Match[str]) -> str:
        path = leads(here, found["to"])
        if not path.exists():
            return found[0]
        return os.path.relpath(page_of(path), PurePosixPath(page.file.src_uri).parent)

    return _LINK.sub(led, markdown)


def notebook_page(path: Path) -> dict[str, str]:
    """Return a notebook as a page, and the pictures that it shows."""
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
    """Return the text of an output of a cell."""
    return output.text if output.output_type == "stream" else output.data["text/plain"]
