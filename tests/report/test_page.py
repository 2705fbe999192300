"""The page of a report: complete without a network, safe for any text in it, and accessible."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import meshwright as mw
from benchmarks import report
from benchmarks._browser import Browser, browser, browser_path
from benchmarks.report import (
    ACCOUNTS,
    EVIL,
    LLAMA,
    MACHINES,
    MEASURED,
    MISSING,
    WIDTHS,
    faults,
    hostile_account,
    of_module,
)
from meshwright.cost import cluster
from meshwright.engine import StaticError
from meshwright.report import account_of, data, page, text
from meshwright.search import Account, Plan, account

VOID = {"meta"}


@pytest.fixture(scope="module", params=ACCOUNTS)
def plan_account(request: pytest.FixtureRequest) -> Account:
    return ACCOUNTS[request.param]()


class Reader(HTMLParser):
    """A parser that collects every element with its attributes, and checks that opened elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.found if name == tag)


def test_a_page_is_one_file_without_requests(plan_account: Account) -> None:
    found = Reader(page(plan_account))
    assert not found.wrong
    assert not found.open
    names = {tag for tag, _ in found.found}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"}
    for _, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert "default-src 'none'" in page(plan_account)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page(plan_account))


def test_a_page_is_accessible(plan_account: Account) -> None:
    found = Reader(page(plan_account))
    assert next(found.all("html"))["lang"] == "en"
    assert {"width=device-width, initial-scale=1"} <= {a.get("content") for a in found.all("meta")}
    assert len([*found.all("h1")]) == 1
    assert len([*found.all("caption")]) == len([*found.all("table")]) > 2
    assert all(a.get("scope") in ("col", "row") for a in found.all("th"))
    assert len([*found.all("summary")]) == len([*found.all("details")])
    wide = [a for a in found.all("div") if a.get("class") == "wide"]
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in wide)
    assert len([*found.all("title")]) > len([*found.all("svg")])  # each picture has a description
    ids = [a["id"] for _, a in found.found if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"] for a in found.all("a")} <= {f"#{i}" for i in ids}
    assert "prefers-color-scheme: dark" in page(plan_account)


def test_a_page_has_the_contents_of_the_account(plan_account: Account) -> None:
    words = html.unescape(" ".join(Reader(page(plan_account)).words))
    for said in (
        plan_account.what,
        plan_account.how,
        plan_account.where,
        *plan_account.why,
        *(row.layout for row in plan_account.laid),
    ):
        assert said in words
    for row in plan_account.sent:
        assert row.kind in words
        assert row.link in words
        assert row.source in words
    for rival in plan_account.rivals:
        assert rival.how in words
        assert rival.why in words
    assert ("The pipeline" in words) == (plan_account.timeline is not None)


def test_data_can_be_written_as_json(plan_account: Account) -> None:
    again = json.loads(json.dumps(data(plan_account, {"seconds": 1.0})))
    assert again["seconds"] == plan_account.seconds
    assert len(again["communications"]) == len(plan_account.sent)
    assert len(again["tensors"]) == len(plan_account.laid)
    assert again["measured"] == {"seconds": 1.0}
    assert ("timeline" in again) == (plan_account.timeline is not None)


def test_text_has_the_titles_of_its_parts(plan_account: Account) -> None:
    said = text(plan_account)
    for title in ("layouts of tensors", "seconds of a step by part", "memory", "why"):
        assert f"\n{title}\n" in said
    assert all(line == line.rstrip() for line in said.splitlines())


def test_the_account_of_a_pipeline_lists_each_parameter_once() -> None:
    plan_account = ACCOUNTS["pipeline"]()
    parameters = [f"{row.layer}.{row.name}" for row in plan_account.laid if row.note == "parameter"]
    assert sorted(parameters) == sorted({f"{n}.{kind}" for n in range(4) for kind in ("weight", "bias")})
    assert plan_account.timeline is not None
    assert plan_account.seconds == pytest.approx(sum(plan_account.spent.values()))
    assert plan_account.seconds > plan_account.timeline.makespan
    assert {row.count for row in plan_account.sent} == {1, 4}  # after the last microbatch, and in each


def test_names_are_harmless() -> None:
    made = page(hostile_account(), {EVIL: 1.0})
    found = Reader(made)
    assert not found.wrong
    assert not {tag for tag, _ in found.found} & {"script", "img"}
    assert not [a for _, attributes in found.found for a in attributes if a.startswith("on")]
    assert "\x00" not in made
    assert "\x1b" not in made
    assert made.count("&lt;script&gt;") > 20
    assert "It does not fit." in made


def test_a_module_with_a_script_for_a_name_is_harmless() -> None:
    model = torch.nn.Module()
    model.add_module("<script>alert(1)</script>", torch.nn.Linear(8, 8))
    model.forward = lambda x: next(model.children())(x).sum()
    made = page(mw.plan(model, [torch.ones(8, 8)], cluster="2xH100")[0].account())
    assert "<script" not in made
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in made


def test_measurements_are_next_to_predictions() -> None:
    plan_account = of_module()
    made = page(plan_account, {"seconds": plan_account.seconds / 2, "bytes": plan_account.nbytes, "loss": 3.0})
    assert "+100.0 %" in made
    assert "+0.0 %" in made
    assert "predicted and measured" in text(plan_account, {"seconds": 1.0})
    assert "measured" not in page(plan_account)


def test_only_the_beginning_of_a_long_pipeline_is_drawn() -> None:
    plan = Plan(tp=4, pp=8, chunks=4, schedule="Interleaved 1F1B", batch=256, sequence=4096)
    plan_account = account(LLAMA, plan, cluster("32xH100"))
    assert plan_account.timeline is not None
    made = page(plan_account)
    assert "16,384 actions" in made
    assert len(made) < 4_000_000
    assert "its beginning" in made


def test_a_plan_without_communication_is_reported() -> None:
    plan_account = account(LLAMA, Plan(batch=8), MACHINES)
    assert "No communication." in page(plan_account)
    assert "no communication" in text(plan_account)


def test_a_model_that_was_not_called_has_no_account() -> None:
    with pytest.raises(StaticError, match="first"):
        account_of(mw.to_static(torch.nn.Linear(2, 2)), "4xH100")


FAULTY = """<!DOCTYPE html><html lang="en"><title>faulty</title><h1>One</h1><h3>Three</h3>
<p style="color: #999; background: #fff">faint</p><p style="width: 2000px">wide</p>
<table><tr><td>cell</td></tr></table><img src="missing.png"><svg><text x="9" y="9" font-size="5">low</text></svg>
<div style="overflow-x: auto; width: 50px"><p style="width: 500px">scrolls</p></div>
<script>console.log("said")</script></html>"""


@pytest.fixture(scope="module")
def shown() -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        pytest.skip(MISSING)  # the goal names the package to install; CI installs it
    with browser(path) as b:
        yield b


@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_finds_no_fault(width: int, shown: Browser, tmp_path: Path) -> None:
    pages = {"pipeline": page(ACCOUNTS["pipeline"](), MEASURED), "evil": page(hostile_account(), {EVIL: 1.0})}
    for name, made in pages.items():
        (tmp_path / f"{name}.html").write_text(made, encoding="utf-8")
        for dark in (False, True):
            assert list(faults(shown, tmp_path / f"{name}.html", width, dark)) == []


def test_a_browser_finds_faults(shown: Browser, tmp_path: Path) -> None:
    (tmp_path / "faulty.html").write_text(FAULTY, encoding="utf-8")
    plan_account = "\n".join(faults(shown, tmp_path / "faulty.html", 400, False))
    for fault in (
        "px wide in a window of 400",
        "a heading 3 behind 1",
        "no caption",
        "no head of a row",
        "no alt",
        "no role",
        "no way to scroll by keys",
        "contrast 2.85 below 4.5",
        "letters of 5.0 px",
        "Runtime.consoleAPICalled",
        "a request: file://",
        "0 of <main>",
    ):
        assert fault in plan_account


def test_without_a_browser_the_figure_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "browser_path", lambda: None)
    figure = report.run()
    assert (figure["value"], figure["ok"]) == (None, False)
    assert "install Chromium" in figure["goal"]
