"""Findings of `meshwright doctor` about devices: driver, transport, links between them, and the latest conformance."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.console.finding import Finding

if TYPE_CHECKING:
    from meshwright.conformance import LatestResult

MODULES = Path("/sys/module")
"""Folder in which Linux shows the versions of loaded drivers."""
DRIVERS = ("nvidia", "amdgpu")
LIMIT = 20.0
"""Seconds that a program of the driver may take."""
KINDS = {
    "NV": "NVLink",
    "PIX": "PCIe, through one switch",
    "PXB": "PCIe, through several switches",
    "PHB": "PCIe, through the host bridge",
    "NODE": "PCIe, through several host bridges",
    "SYS": "PCIe, through the link between processors",
}
"""Beginning of an entry of `nvidia-smi topo -m` → the link that it means."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")


def driver_findings(has_accelerator: bool) -> Iterator[Finding]:
    """Yield the finding for the drivers that the system has loaded, if there are any."""
    versions = {name: _text(MODULES / name / "version") for name in DRIVERS}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if found and has_accelerator:
        yield Finding("driver", found)
    elif found:
        write = "install a build of torch for this driver: https://pytorch.org/get-started/locally"
        yield Finding("driver", f"{found}; torch sees no accelerator", False, False, write)


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def transport_version(kind: str, transport: str) -> str:
    """Return the version of the transport's library, if torch's module for the type of device has it; else ""."""
    import torch

    library = getattr(torch.get_device_module(kind), transport, None)
    version = getattr(library, "version", None)
    if not callable(version):
        return ""
    with suppress(Exception):  # the library itself may be missing
        found = version()
        return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)
    return ""


def topology_findings() -> Iterator[Finding]:
    """Yield the finding for the links between GPUs, if the driver has a program that prints them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    with suppress(OSError, subprocess.SubprocessError):
        printed = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, timeout=LIMIT, check=True
        ).stdout
        if links := links_in(printed):
            yield Finding("links", links)


def links_in(printed: str) -> str:
    """Return the numbers of pairs of GPUs by link, from the matrix that `nvidia-smi topo -m` prints; "" without pairs.

    >>> links_in("\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-47\\nGPU1\\tNV18\\t X \\t0-47")
    '1 of 1 pairs of GPUs by NVLink (NV18)'
    """
    rows = [[cell.strip() for cell in line.split("\t")] for line in _ESCAPES.sub("", printed).splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    columns = [at for at, name in enumerate(header) if _GPU.fullmatch(name)]
    counts = Counter(_above_diagonal(rows, columns))
    return ", ".join(f"{count} of {counts.total()} pairs of GPUs by {_link(kind)}" for kind, count in counts.items())


def _above_diagonal(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> Iterator[str]:
    """Yield the entry of each pair of GPUs once."""
    lines = [row for row in rows if _GPU.fullmatch(row[0])]
    for at, row in enumerate(lines):
        yield from (row[column] for column in columns[at + 1 :] if column < len(row))


def _link(kind: str) -> str:
    name = next((name for start, name in KINDS.items() if kind.startswith(start)), "another link")
    return f"{name} ({kind})"


def conformance_finding(device: str) -> Finding:
    """Return the finding for the latest results of `meshwright conformance` on this machine."""
    from meshwright.conformance import latest_results

    write = f"run meshwright conformance --device {device}"
    results = latest_results(device)
    if not results:
        return Finding("conformance", f"{device}: never run", False, False, write)
    failed = [each.level for each in results if not each.ok]
    if failed:
        write = f"look at meshwright conformance --device {device} --level {failed[0]}"
    runs = [list(levels) for _, levels in groupby(results, key=lambda each: (each.on, each.facts))]
    return Finding("conformance", f"{device}: {'; '.join(map(_run_text, runs))}", not failed, False, write)


def _run_text(levels: Sequence[LatestResult]) -> str:
    """Return the text about levels that ran on one day on one machine."""
    first, last = levels[0], levels[-1]
    counts = sum((Counter(each.counts) for each in levels), Counter[str]())
    which = f"level {first.level}" if first is last else f"levels {', '.join(str(each.level) for each in levels)}"
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    names = [name for each in levels for name in each.failed]
    failures = f" ({', '.join(names[:3])}{', …' if names[3:] else ''})" if names else ""
    host = ", processes through the host" if first.facts.through_host else ""
    return f"{which} on {first.on}: {told}{failures}; {first.facts.name}, torch {first.facts.torch}{host}"
