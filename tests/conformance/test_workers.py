"""A check that is wrong, raises, hangs or dies is reported as such, and the others run."""

from __future__ import annotations

import re

import pytest

from meshwright.conformance import Facts, Options, Report, Result, run_checks, uses_of
from meshwright.conformance.workers import supervisor, worker
from meshwright.conformance.workers.traces import error_text
from meshwright.layout import PlatformError

from ._broken_checks import CHECKS

pytestmark = pytest.mark.usefixtures("forked_processes")

TABLE = "tests.conformance._broken_checks:CHECKS"


def run(processes: int) -> tuple[Report, list[Result]]:
    shown: list[Result] = []
    chosen = [check for check in CHECKS if check.processes == processes]
    return run_checks(chosen, Options("cpu", table=TABLE), shown.append), shown


@pytest.fixture(scope="module")
def one_process() -> Report:
    """Return the report of three workers: a hang and a death end one each."""
    report, shown = run(1)
    assert list(report.results) == shown
    return report


@pytest.mark.parametrize(
    ("name", "state", "detail"),
    [
        ("right", "ok", "on cpu"),
        ("wrong", "WRONG", "[1] instead of [2]"),
        ("raises", "RAISED", "ZeroDivisionError: no number (tests/conformance/_broken_checks.py:N)"),
        ("hangs", "HUNG", "after 0.5 s (tests/conformance/_broken_checks.py:N)"),
        ("dies", "DIED", "SIGSEGV (tests/conformance/_broken_checks.py:N)"),
        ("does not apply", "not run", "needs 2 devices, found 1"),
        ("right after all", "ok", "on cpu"),
    ],
)
def test_each_end_is_reported(one_process: Report, name: str, state: str, detail: str) -> None:
    (found,) = (each for each in one_process.results if each.name == name)
    assert (found.state, re.sub(r"py:\d+", "py:N", found.detail)) == (state, detail)


def test_the_report_counts_and_judges(one_process: Report) -> None:
    assert one_process.counts == {"ok": 2, "WRONG": 1, "RAISED": 1, "HUNG": 1, "DIED": 1, "not run": 1}
    assert not one_process.ok
    assert one_process.facts is not None
    assert (one_process.facts.device, one_process.facts.count) == ("cpu", 1)
    answers = {each.use: each.answer for each in uses_of(one_process.results)}
    assert answers["tensors on one device"] == answers["all operators that have rules"] == "no"
    assert answers["simulated ranks"] == "unknown"


def test_a_failure_on_one_rank_is_reported_with_the_rank() -> None:
    """The other rank waits for a call that never comes."""
    report, _ = run(2)
    assert [(each.state, each.detail) for each in report.results] == [
        ("ok", "on cpu"),
        ("WRONG", "rank 1: other numbers"),
    ]


def test_a_worker_that_does_not_start_is_reported() -> None:
    report = run_checks(CHECKS[:2], Options("cpu", ("tests.conformance.no_such_module",), TABLE), lambda result: None)
    start, *others = report.results
    assert start.state == "RAISED"
    assert "no_such_module" in start.detail
    assert {each.state for each in others} == {"not run"}
    assert not report.ok


@pytest.mark.parametrize(
    ("device", "count", "options", "reason"),
    [
        ("cpu", 1, Options(), "needs 4 cores, found 2"),
        ("cpu", 1, Options(processes=4), ""),
        ("cpu", 1, Options(processes=2), "needs 4 processes"),
        ("vdev", 4, Options(), ""),
        ("vdev", 2, Options(processes=4), "needs 4 devices, found 2"),
        ("vdev", 1, Options(through_host=True), "needs 4 cores, found 2"),
        ("vdev", 1, Options(through_host=True, processes=4), ""),
    ],
)
def test_four_processes_need_devices_or_cores(
    device: str, count: int, options: Options, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor.os, "cpu_count", lambda: 2)
    run = supervisor._Run(options, print, Facts(device, count, (), "", "", "", ""))
    assert run.why_not(4) == reason
    assert run.why_not(2) == ""


@pytest.mark.parametrize("device", ["vdev", "cpu:0", "meta"])
def test_a_device_that_torch_cannot_use_is_named(device: str) -> None:
    with pytest.raises(PlatformError, match=rf"devices of type '{device}'(.|\n)*fix:(.|\n)*--import"):
        worker._usable_device(device, 0)


def test_the_text_of_an_error_names_its_class_once() -> None:
    error = PlatformError("asked", "found", "why", "fix")
    assert error_text(error).count("PlatformError") == 1
