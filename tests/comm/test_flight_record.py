"""Flight records: complete JSON of the last calls, readable by the user alone, written only if a call fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.comm import CommCall, CommError
from meshwright.comm.launcher.rendezvous import RankAddress
from meshwright.comm.process.flight_record import LENGTH, VARIABLE, Record, record_folder

PLACE = RankAddress(1, 2, 1, "127.0.0.1", 1, True, "run/../0")
CALL = CommCall("all_reduce", "sum", torch.float32, ((2,),), ((2,),), (0, 1))


def test_a_record_has_the_last_calls_and_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "records"))
    record = Record(PLACE)
    for _ in range(LENGTH + 7):
        record.begin(CALL).ended = 5.0
    assert not list(tmp_path.iterdir())
    error = CommError("asked", "found", "why", "fix")
    record.name_in(error, {"state": "waits"})
    (folder,) = (tmp_path / "records").iterdir()
    assert [path.name for path in folder.iterdir()] == ["rank-1.json"]
    assert str(folder) in str(error)
    assert error.args[3].startswith("fix; read the last calls of each rank in ")
    found = json.loads((folder / "rank-1.json").read_text())
    assert [call["number"] for call in found["calls"]] == list(range(8, LENGTH + 8))
    assert found["calls"][0] | {"began": 0} == {
        "number": 8,
        "call": str(CALL),
        "began": 0,
        "agreed": None,
        "ended": 5.0,
    }
    assert (found["rank"], found["size"], found["state"]) == (1, 2, "waits")
    assert (folder / "rank-1.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("run", ["a/0", "../../etc", "a\0b", "x" * 50, "ä/ö"])
def test_the_folder_of_a_run_is_inside_that_of_all_records(run: str, tmp_path: Path) -> None:
    folder = record_folder(run, {VARIABLE: str(tmp_path)})
    assert folder is not None
    assert folder.parent == tmp_path
    assert folder.name not in ("", ".", "..")


def test_no_record_is_written_if_off_or_if_the_folder_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in ("off", str(tmp_path / "file"), "/proc/none"):
        monkeypatch.setenv(VARIABLE, folder)
        error = CommError("asked", "found", "why", "fix")
        Record(PLACE).name_in(error, {})
        assert error.write == "fix"
    assert record_folder("run", {VARIABLE: "off"}) is None


def test_the_default_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    record = Record(PLACE)
    path = record.write("error", {})
    assert path is not None
    own = path.parent.parent
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    assert record.write("error", {}) is None
