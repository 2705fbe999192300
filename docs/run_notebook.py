"""Runs the notebooks and stores what they print (`make notebook`); with --check, tells what they print otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook, run from its first cell to its last; raises the error of a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:  # sockets in a folder: no port is opened
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        NotebookClient(
            notebook, km=kernel, timeout=120, coalesce_streams=True, resources={"metadata": {"path": path.parent}}
        ).execute()  # one output per stream, however its writes arrive
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def lines(notebook: nbformat.NotebookNode) -> list[str]:
    """Cells of code and what they show, pictures included, line by line."""
    return [
        line
        for cell in notebook.cells
        if cell.cell_type == "code"
        for text in [cell.source, *(text for output in cell.outputs for text in texts(output))]
        for line in text.splitlines()
    ]


def texts(output: nbformat.NotebookNode) -> list[str]:
    return [output.text] if output.output_type == "stream" else [output.data[kind] for kind in sorted(output.data)]


def changes(path: Path) -> Iterator[str]:
    """Where the outputs that are stored are not those of today."""
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    return unified_diff(lines(stored), lines(executed(path)), f"{path.name}, stored", "today", lineterm="")


def main() -> None:
    if "--check" in sys.argv:
        sys.exit("\n".join(line for path in NOTEBOOKS for line in changes(path)) or None)
    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
