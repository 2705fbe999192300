"""The examples of the page about rules run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from meshwright.spmd.rules.rule_table import RULES


def test_the_examples_of_the_page_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "concepts" / "rule.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, names)
    del RULES["mylib.swiglu"]
