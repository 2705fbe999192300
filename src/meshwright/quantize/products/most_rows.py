"""The most rows for which a kernel is faster than torch: a table by processor, and the one that a user measured."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import torch

from meshwright.layout import InputError, read_json, read_text_file
from meshwright.tensor import kernel_folder, processor

ANY = 2**62


class MostRows(NamedTuple):
    """The most rows of inputs for which a kernel of this package is faster than torch's products.

    `codes` and `half` are for packed codes with inputs in float32 and in half precision; `integers` is for int8 codes.
    """

    codes: int
    half: int
    integers: int

    def shown(self) -> dict[str, int | str]:
        """Return the table by name, with "any" for any number of rows."""
        return {name: "any" if most == ANY else most for name, most in self._asdict().items()}


BUILT_IN = {"AVX2": MostRows(64, ANY, 128), "AVX512": MostRows(16, 16, 4)}
"""By the vectors of the processor. Those of AVX-512 are low, because they were not measured."""


def built_in_rows() -> MostRows:
    return BUILT_IN.get(torch.backends.cpu.get_cpu_capability(), MostRows(0, 0, 0))


@cache
def most_rows() -> MostRows:
    """Return the table that the user measured on this processor, or else the one of the library."""
    with suppress(OSError, InputError, KeyError, TypeError, ValueError):
        path = _path()
        found = read_json(read_text_file(path)) if path is not None and path.exists() else {}
        return MostRows(*(int(found[name]) for name in MostRows._fields))
    return built_in_rows()


def keep_rows(rows: MostRows) -> Path | None:
    """Write the table for later processes of this user, and return its path; None if there is no folder for it."""
    path = _path()
    if path is None:
        return None
    part = path.with_name(f".{token_hex(8)}.json")
    try:
        part.write_text(json.dumps(rows._asdict()))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    most_rows.cache_clear()
    return path


def _path() -> Path | None:
    """Return the path of the table of this processor and this release of torch."""
    folder = kernel_folder()
    key = sha256(f"{torch.__version__} {processor()}".encode()).hexdigest()[:16]
    return None if folder is None else folder / f"most-rows-{key}.json"
