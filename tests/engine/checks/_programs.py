"""`python _programs.py FOLDER`: one of two ranks, which runs the cases of all tests of this folder."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import meshwright as mw

MODULES = ("_other_steps", "_pipelines", "_faulty_steps")
"""Files beside this script."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = mw.init_process().rank
    found: dict[str, Any] = {}
    for name in MODULES:
        found |= import_module(name).results()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
