"""Pages as programs: the fenced blocks of a page, and the output of its code."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of the first line of its text."""

    kind: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m["kind"], m["text"], text[: m.start("text")].count("\n") + 1) for m in _BLOCK.finditer(text)]


def run(page: Path) -> Iterator[tuple[Block, str, str]]:
    """Yield (block, printed output, output on the page) of each python block before a text block; all blocks run."""
    names: dict[str, Any] = {"__name__": page.stem}
    found = [b for b in blocks(page) if b.kind in ("python", "text")]
    for at, block in enumerate(found):
        if block.kind != "python":
            continue
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        if at + 1 < len(found) and found[at + 1].kind == "text":
            yield block, _tidy(printed.getvalue()), _tidy(found[at + 1].text)


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
