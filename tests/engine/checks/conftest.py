"""One start of two processes for all tests of this folder; a process imports torch for seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm import launch
from tests.forked.popen import Server


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory, fork_server: Server) -> list[dict[str, Any]]:
    """Return the results of both ranks, by the names of cases."""
    folder = tmp_path_factory.mktemp("two")
    with fork_server.forking():
        assert launch([str(Path(__file__).with_name("_programs.py")), str(folder)], 2, timeout=110) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
