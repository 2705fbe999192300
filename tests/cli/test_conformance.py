"""`meshwright conformance`: lines, JSON, the page, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright.conformance as package
from meshwright.cli import main
from meshwright.conformance import Facts, Options, Report, Result

RESULTS = (
    Result(0, "copy of float32", "ok", "", 0.1),
    Result(1, "mm", "WRONG", "[1 < 2] instead of [3]", 0.2),
    Result(3, "exchange", "not run", "needs 2 devices, found 1"),
)
FACTS = Facts("vdev", 1, ("float32",), "V1", "2.13", "3.11", "Linux")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that takes the place of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Options]]:
    """Return the checks and the options of each run, which gives `RESULTS`."""
    seen: list[tuple[list[str], Options]] = []

    def run_checks(checks: object, options: Options, on_result: object) -> Report:
        seen.append(([each.key for each in checks], options))
        for each in RESULTS:
            on_result(each)
        return Report(FACTS, RESULTS, "2026-11-26")

    monkeypatch.setattr(package, "run_checks", run_checks)
    return seen


def test_one_line_for_each_check_and_the_uses(asked: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "ok       L0 copy of float32",
        "WRONG    L1 mm  [1 < 2] instead of [3]",
        "not run  L3 exchange  needs 2 devices, found 1",
    ]
    assert "1 x vdev (V1); float32; torch 2.13, Python 3.11, Linux" in lines
    assert "yes      tensors on one device: 1 checks" in lines
    assert "no       all operators that have rules: 1 of 1 checks failed: mm" in lines
    assert "unknown  communication between processes: needs 2 devices, found 1" in lines
    assert lines[-1] == "3 checks: 1 ok, 1 WRONG, 1 not run"


def test_json_is_one_object(asked: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--json"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["ok"], found["on"], found["machine"]["device"]) == (False, "2026-11-26", "vdev")
    assert found["counts"] == {"ok": 1, "WRONG": 1, "not run": 1}
    assert found["results"][1]["detail"] == "[1 < 2] instead of [3]"
    assert found["uses"][0] == {"use": "tensors on one device", "answer": "yes", "reason": "1 checks"}
    assert "WRONG    L1 mm" in printed.err


def test_the_page_shows_all_results(asked: object, tmp_path: Path) -> None:
    main(["conformance", "--html", str(tmp_path / "a.html")])
    text = (tmp_path / "a.html").read_text()
    assert all(word in text for word in ("Conformance of vdev", "[1 &lt; 2] instead of [3]", "Level 1: operators"))


def test_the_latest_results_of_each_level_are_kept(asked: object, cache: Path) -> None:
    assert package.latest_results("vdev") == []
    main(["conformance"])
    latest = package.latest_results("vdev")
    assert [(each.level, each.on, each.failed) for each in latest] == [
        (0, "2026-11-26", ()),
        (1, "2026-11-26", ("mm",)),
        (3, "2026-11-26", ()),
    ]
    assert {each.facts for each in latest} == {FACTS}
    assert latest[2].counts == {"not run": 1}
    facts = {"dtypes": []}
    for other in ("[1", "[]", json.dumps({"level": 1, "on": "", "facts": facts, "failed": [], "counts": {"ok": "x"}})):
        (cache / "meshwright" / "conformance" / "vdev" / "level-1.json").write_text(other)
        assert [each.level for each in package.latest_results("vdev")] == [0, 3]


def test_some_checks_of_a_level_are_not_kept_as_its_result(asked: object) -> None:
    main(["conformance", "--only", "all-gather"])
    assert package.latest_results("vdev") == []


def test_a_cache_folder_that_cannot_be_written_is_no_error(asked: object, cache: Path) -> None:
    cache.write_text("a file")
    assert main(["conformance"]) == 1
    assert package.latest_results("vdev") == []


def test_options_choose_the_checks(asked: list[tuple[list[str], Options]]) -> None:
    main(["conformance", "--device", "vdev", "--level", "2-3", "--only", "all-gather", "--import", "json"])
    ((keys, options),) = asked
    assert {key[:2] for key in keys} == {"L2", "L3"}
    assert all("all-gather" in key for key in keys)
    assert options == Options("vdev", ("json",))


def test_a_run_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "cpu", "--level", "0", "--only", "copy of"]) == 0
    assert capsys.readouterr().out.count("ok       L0 copy of") == 14


def test_a_run_without_an_ok_check_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "cpu", "--level", "0", "--only", "memory statistics"]) == 1


@pytest.mark.parametrize(
    ("level", "text", "fix"),
    [("0", "Softmax operator", "such as --only '"), ("0", "reduction by SUM", "add --level 2")],
)
def test_a_name_that_no_check_has_is_refused(
    level: str, text: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--level", level, "--only", text]) == 2
    assert fix in capsys.readouterr().err


def test_names_are_found_in_any_case(asked: list[tuple[list[str], Options]]) -> None:
    main(["conformance", "--only", "All-Gather"])
    assert asked[0][0]
