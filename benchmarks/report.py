"""The report of a plan in a real browser, by width, colour scheme, keyboard and screen reader: faults.

Every page is opened from a file, as `meshwright explain --html` writes it. These are faults: a line in the console, a
request to any address, a page that scrolls sideways, a table or a picture without words, an element that keys do not
reach, and letters that are small or have too little contrast.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

import meshwright as mw
from benchmarks._browser import Browser, browser, browser_path
from meshwright.cli import main
from meshwright.cost import cluster
from meshwright.pipeline import one_f_one_b, simulate_schedule
from meshwright.report import account_of, page
from meshwright.search import (
    Account,
    Communication,
    MemoryCurve,
    OtherPlan,
    Plan,
    TensorLayout,
    Transformer,
    account,
    choose,
    parse_mesh_plan,
)

WIDTHS = (1280, 400)
CHECKS = (Path(__file__).parent / "_page.js").read_text(encoding="utf-8")
MISSING = "there is no browser on this machine; install Chromium (on Debian: apt install chromium)"
FOCUS = 'document.activeElement === document.body ? "" : document.activeElement.outerHTML.slice(0, 80)'
STOPS = """[...document.querySelectorAll("a, summary, [tabindex='0']")]"""
REACHED = f"{STOPS}.indexOf(document.activeElement)"
REACHABLE = f"{STOPS}.filter(e => e.checkVisibility()).length"
OPEN_ALL = 'document.querySelectorAll("details").forEach(e => e.open = true)'
TAB, ENTER, RIGHT = ("Tab", 9), ("Enter", 13, "\r"), ("ArrowRight", 39)
OUTLINED = 'getComputedStyle(document.activeElement).outlineStyle !== "none"'
ACTS = (
    ("summary", "e => e.checkVisibility()", ENTER, "e.parentElement.open"),
    (".wide", "e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 40", RIGHT, "e.scrollLeft"),
)
"""Kind of element, elements of that kind, the pressed key, and the expected change."""
NAMED = {"table", "image", "region", "link", "navigation", "img", "graphics-document"}

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
MACHINES = cluster("64xH100, 8 per node, 400G")
CONFIG = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "vocab_size": 128256,
}  # fmt: skip
PLAN = (
    "dp = 8\ntp = 8\npp = 4\nchunks = 4\nzero = 1\nsequence_parallel = true\nschedule = 'Interleaved 1F1B'\n"
    "batch = 128\nsequence = 8192\n"
)
EVIL = '<script>alert("1")</script>"\'><img src=x onerror=alert(2)>&amp;\x00\x1b'
MEASURED = {"seconds": 1.25, "bytes": 5e10}


def of_sizes() -> Account:
    plan = Plan(dp=8, tp=4, pp=2, zero=1, sequence_parallel=True, batch=256, sequence=8192)
    return account(LLAMA, plan, MACHINES, choose(LLAMA, MACHINES, 64, 256, 8192, keep=3))


def of_module() -> Account:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    best, *others = mw.plan(model, (torch.ones(64, 64), torch.ones(64, 64)), mse_loss, cluster="8xH100")
    return best.account(others)


def trained_model(pipeline: bool) -> Any:
    """Return a model after a training step on four simulated ranks, as on rank 0."""

    def train() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        if not pipeline:
            plan = parse_mesh_plan('[mesh]\ndp = 2\ntp = 2\n[layouts]\n"0.weight" = "f32[8@tp, 8]"')
            step = mw.auto(model, [(x, y)], mse_loss, optimizer, plan=plan)
        else:
            mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
            mw.split_pipeline(model, mesh, batch=[mw.Shard(0)])
            options = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 4})
            step = mw.to_static(model, loss=mse_loss, optimizer=torch.optim.AdamW(model.parameters()), strategy=options)
        step(x, y)
        return step

    return mw.simulate(train, 4)[0]


def hostile_account() -> Account:
    """Return an account whose texts are all pieces of HTML, in one long word."""
    table = replace(one_f_one_b(2, 2), name=EVIL)
    return Account(
        EVIL,
        EVIL,
        EVIL,
        1.0,
        2.0,
        1.0,
        (EVIL,),
        {EVIL: 1.0},
        {EVIL: {EVIL: 2.0}},
        (
            TensorLayout(f"{EVIL}.{EVIL}", EVIL, EVIL, 1.0, EVIL),
            *(TensorLayout(EVIL, EVIL, EVIL, 1.0, EVIL) for _ in range(4)),
        ),
        (Communication(EVIL, EVIL, EVIL, EVIL, 1, 1.0, 1.0, 1.0, EVIL),),
        (OtherPlan(EVIL, 1.0, 1.0, EVIL),),
        {EVIL: EVIL},
        simulate_schedule(table),
        (MemoryCurve(EVIL, ((0.0, 1.0), (1.0, 2.0))),),
    )


ACCOUNTS: dict[str, Callable[[], Account]] = {
    "sizes": cache(of_sizes),
    "module": cache(of_module),
    "program": cache(lambda: account_of(trained_model(False), "4xH100")),
    "pipeline": cache(lambda: account_of(trained_model(True), cluster("4xH100"))),
}


def written_pages(folder: Path) -> dict[str, Path]:
    """Return pages as files: one by the command line, and one per account, with and without measurements."""
    config, plan, report = folder / "config.json", folder / "plan.toml", folder / "report.html"
    config.write_text(json.dumps(CONFIG))
    plan.write_text(PLAN)
    words = ["explain", str(config), str(plan), "--cluster", "256xH100, 8 per node, 400G", "--html", str(report)]
    with redirect_stdout(io.StringIO()):
        assert main([*words, "--json"]) == 0
    pages = {"command line": report}
    made = {name: page(make()) for name, make in ACCOUNTS.items()}
    made |= {"measured": page(ACCOUNTS["sizes"](), MEASURED), "strange names": page(hostile_account(), {EVIL: 1.0})}
    for name, text in made.items():
        pages[name] = folder / f"{name}.html"
        pages[name].write_text(text, encoding="utf-8")
    return pages


def faults(b: Browser, path: Path, width: int, dark: bool) -> Iterator[str]:
    """Yield the faults of a page in a window of so many pixels."""
    b.open(path.as_uri(), width, dark)
    yield from keyboard_faults(b)
    b.value(OPEN_ALL)
    yield from b.value(CHECKS)
    yield from unnamed_elements(b)
    yield from browser_events(b, path)


def browser_events(b: Browser, path: Path) -> Iterator[str]:
    """Yield the browser's console messages, and its requests other than the file."""
    for event in b.events:
        told = event["params"]
        if event["method"] != "Network.requestWillBeSent":
            yield f"{event['method']}: {json.dumps(told)[:200]}"
        elif told["request"]["url"] != path.as_uri():
            yield f"a request: {told['request']['url']}"


def keyboard_faults(b: Browser) -> Iterator[str]:
    """Yield the faults of the keyboard: Tab reaches everything from the top down; keys unfold and scroll elements."""
    there, seen = b.value(REACHABLE), list[int]()
    for _ in range(there):
        b.press(*TAB)
        seen.append(b.value(REACHED))
        if not b.value(OUTLINED):
            yield f"nothing shows that keys are at {b.value(FOCUS)}"
    if sorted(seen) != seen or len({*seen} - {-1}) != there:
        yield f"Tab reaches {len({*seen} - {-1})} of {there}, in the order {seen}"
    for kind, which, keys, change in ACTS:
        if b.value(f"(window.e = [...document.querySelectorAll('{kind}')].find({which})) && e.focus(), !!e"):
            before = b.value(change)
            b.press(*keys)
            if b.value(f"new Promise(done => setTimeout(() => done({change}), 250))") == before:
                yield f"{keys[0]} does nothing at {b.value(FOCUS)}"


def unnamed_elements(b: Browser) -> Iterator[str]:
    """Yield the elements without a name for a screen reader; all elements of these kinds need one."""
    for node in b.send("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if role in NAMED and not node["ignored"] and not node.get("name", {}).get("value", "").strip():
            yield f"a {role} without a name"


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of faults in all the pages."""
    path = browser_path()
    wrong, shown = list[str](), 0
    with tempfile.TemporaryDirectory() as name:
        if path is not None:
            pages = written_pages(Path(name))
            chosen = ["pipeline", "module"] if quick else pages
            with browser(path) as b:
                for key in chosen:
                    for width in WIDTHS:
                        for dark in (False, True):
                            told = f"{key}, {width} px, {'dark' if dark else 'light'}"
                            wrong += [f"{told}: {fault}" for fault in faults(b, pages[key], width, dark)]
                            shown += 1
    return {
        "name": "report",
        "value": len(wrong) if path else None,
        "goal": f"no fault on any of {shown} pages" if path else MISSING,
        "ok": path is not None and not wrong,
        "details": {"shown": shown, "faults": wrong},
    }
