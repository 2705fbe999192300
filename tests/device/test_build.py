"""A build that fails is an error, also after a build that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import build as builder


def test_a_missing_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed build leaves torch's file `lock`, for whose removal torch waits without a limit."""
    monkeypatch.setattr(builder, "OUT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    folder = tmp_path / builder._key()
    folder.mkdir()
    (folder / "lock").touch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)no-such-compiler.*fix: .* install g\+\+"):
            builder.build()
    assert sorted(path.name for path in folder.iterdir()) == ["build.lock", "lock"]
