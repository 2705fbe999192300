"""A page: complete without a network, harmless whatever is written into it, and readable by everybody."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import meshwright as mw
from meshwright.cost import cluster
from meshwright.engine import StaticError
from meshwright.pipeline import one_f_one_b, simulate
from meshwright.report import account_of, data, page, text
from meshwright.search import Account, Curve, Laid, Plan, Rival, Sent, Transformer, account, choose, parse_mesh_plan

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
MACHINES = cluster("64xH100, 8 per node, 400G")
EVIL = '<script>alert("1")</script>"\'><img src=x onerror=alert(2)>&amp;\x00\x1b'
VOID = {"meta"}
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


def of_sizes() -> Account:
    plan = Plan(dp=8, tp=4, pp=2, zero=1, sequence_parallel=True, batch=256, sequence=8192)
    return account(LLAMA, plan, MACHINES, choose(LLAMA, MACHINES, 64, 256, 8192, keep=3))


def of_module() -> Account:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    best, *others = mw.plan(model, (torch.ones(64, 64), torch.ones(64, 64)), mse_loss, cluster="8xH100")
    return best.account(others)


def trained(pipeline: bool) -> Any:
    def train() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        if not pipeline:
            plan = parse_mesh_plan('[mesh]\ndp = 2\ntp = 2\n[layouts]\n"0.weight" = "f32[8@tp, 8]"')
            step = mw.auto(model, (x, y), mse_loss, optimizer, plan=plan)
        else:
            mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
            mw.split_pipeline(model, mesh, batch=[mw.Shard(0)])
            options = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 4})
            step = mw.to_static(model, loss=mse_loss, optimizer=torch.optim.AdamW(model.parameters()), strategy=options)
        step(x, y)
        return step

    return mw.simulate(train, 4)[0]


ACCOUNTS = {
    "sizes": of_sizes,
    "module": of_module,
    "program": lambda: account_of(trained(False), "4xH100"),
    "pipeline": lambda: account_of(trained(True), cluster("4xH100")),
}


@pytest.fixture(scope="module", params=ACCOUNTS)
def told(request: pytest.FixtureRequest) -> Account:
    return ACCOUNTS[request.param]()


class Reader(HTMLParser):
    """Every element with its attributes, and whether what is opened is closed."""

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


def test_a_page_is_one_file_that_asks_for_nothing(told: Account) -> None:
    found = Reader(page(told))
    assert not found.wrong
    assert not found.open
    names = {tag for tag, _ in found.found}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"}
    for _, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert "default-src 'none'" in page(told)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page(told))


def test_a_page_can_be_read_by_everybody(told: Account) -> None:
    found = Reader(page(told))
    assert next(found.all("html"))["lang"] == "en"
    assert {"width=device-width, initial-scale=1"} <= {a.get("content") for a in found.all("meta")}
    assert len([*found.all("h1")]) == 1
    assert len([*found.all("caption")]) == len([*found.all("table")]) > 2
    assert all(a.get("scope") in ("col", "row") for a in found.all("th"))
    assert len([*found.all("summary")]) == len([*found.all("details")])
    wide = [a for a in found.all("div") if a.get("class") == "wide"]
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in wide)
    assert len([*found.all("title")]) > len([*found.all("svg")])  # each picture says what it shows
    ids = [a["id"] for _, a in found.found if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"] for a in found.all("a")} <= {f"#{i}" for i in ids}
    assert "prefers-color-scheme: dark" in page(told)


def test_a_page_says_what_the_account_says(told: Account) -> None:
    words = html.unescape(" ".join(Reader(page(told)).words))
    for said in (told.what, told.how, told.where, *told.why, *(row.layout for row in told.laid)):
        assert said in words
    for row in told.sent:
        assert row.kind in words
        assert row.link in words
        assert row.source in words
    for rival in told.rivals:
        assert rival.how in words
        assert rival.why in words
    assert ("The pipeline" in words) == (told.timeline is not None)


def test_data_is_what_json_takes(told: Account) -> None:
    again = json.loads(json.dumps(data(told, {"seconds": 1.0})))
    assert again["seconds"] == told.seconds
    assert len(again["communications"]) == len(told.sent)
    assert len(again["tensors"]) == len(told.laid)
    assert again["measured"] == {"seconds": 1.0}
    assert ("timeline" in again) == (told.timeline is not None)


def test_text_fits_what_it_says(told: Account) -> None:
    said = text(told)
    for title in ("tensors and how they lie", "where the time goes", "memory", "why"):
        assert f"\n{title}\n" in said
    assert all(line == line.rstrip() for line in said.splitlines())


def evil() -> Account:
    """Every text is a piece of a page."""
    table = replace(one_f_one_b(2, 2), name=EVIL)
    return Account(
        EVIL, EVIL, EVIL, 1.0, 2.0, 1.0, (EVIL,), {EVIL: 1.0}, {EVIL: {EVIL: 2.0}},
        (Laid(f"{EVIL}.{EVIL}", EVIL, EVIL, 1.0, EVIL), *(Laid(EVIL, EVIL, EVIL, 1.0, EVIL) for _ in range(4))),
        (Sent(EVIL, EVIL, EVIL, EVIL, 1, 1.0, 1.0, 1.0, EVIL),), (Rival(EVIL, 1.0, 1.0, EVIL),), {EVIL: EVIL},
        simulate(table), (Curve(EVIL, ((0.0, 1.0), (1.0, 2.0))),),
    )  # fmt: skip


def test_a_pipelines_account_tells_each_parameter_once() -> None:
    told = ACCOUNTS["pipeline"]()
    parameters = [f"{row.layer}.{row.name}" for row in told.laid if row.note == "parameter"]
    assert sorted(parameters) == sorted({f"{n}.{kind}" for n in range(4) for kind in ("weight", "bias")})
    assert told.timeline is not None
    assert told.seconds == pytest.approx(sum(told.spent.values()))
    assert told.seconds > told.timeline.makespan
    assert {row.count for row in told.sent} == {1, 4}  # behind the last microbatch, and in each


def test_names_are_harmless() -> None:
    made = page(evil(), {EVIL: 1.0})
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


def test_measured_stands_beside_predicted() -> None:
    told = of_module()
    made = page(told, {"seconds": told.seconds / 2, "bytes": told.nbytes, "loss": 3.0})
    assert "+100.0 %" in made
    assert "+0.0 %" in made
    assert "predicted and measured" in text(told, {"seconds": 1.0})
    assert "measured" not in page(told)


def test_long_pipelines_are_drawn_from_their_beginning() -> None:
    plan = Plan(tp=4, pp=8, chunks=4, schedule="Interleaved 1F1B", batch=256, sequence=4096)
    told = account(LLAMA, plan, cluster("32xH100"))
    assert told.timeline is not None
    made = page(told)
    assert "16,384 actions" in made
    assert len(made) < 4_000_000
    assert "its beginning" in made


def test_nothing_sent_is_said() -> None:
    told = account(LLAMA, Plan(batch=8), MACHINES)
    assert "Nothing is sent." in page(told)
    assert "no communication" in text(told)


def test_a_model_that_was_not_called_has_no_account() -> None:
    with pytest.raises(StaticError, match="first"):
        account_of(mw.to_static(torch.nn.Linear(2, 2)), "4xH100")


def shown(made: str, folder: Path, width: int) -> int:
    """How wide a page is that a browser shows in a window of so many pixels."""
    frame = (
        f'<p id="out"></p><iframe id="f" width="{width}" height="900" style="border:0" srcdoc="{html.escape(made)}">'
        '</iframe><script>addEventListener("load", () => { out.textContent = '
        '"=" + f.contentDocument.documentElement.scrollWidth + "=" })</script>'
    )
    (folder / "frame.html").write_text(frame, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    done = subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={folder}", "--dump-dom", (folder / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=100, check=True, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    found = re.search(r">=(\d+)=<", done.stdout)
    assert found, done.stdout[:300]
    return int(found[1])


@pytest.mark.skipif(not BROWSER, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_is_no_wider_than_its_window(width: int, tmp_path: Path) -> None:
    for made in (page(of_sizes()), page(evil(), {EVIL: 1.0})):
        assert shown(made, tmp_path, width) <= width
