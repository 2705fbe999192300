"""Command lines with a mistake that do not end with one clear message and the right exit code.

Each line runs in this process. Some lines also run as processes of their own, without any patches.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli import main
from meshwright.cli.console.parser import COMMANDS

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
FILES = {
    "config.json": json.dumps(SIZES),
    "empty.json": "{}",
    "experts.json": json.dumps({**SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
    "infinite.json": json.dumps(SIZES).replace(": 64,", ": 1e400,"),
    "headless.json": json.dumps({**SIZES, "num_attention_heads": 0}),
    "broken.json": "{",
    "list.json": "[1, 2]",
    "plan.toml": "dp = 2\nbatch = 8\nsequence = 64\n",
    "broken.toml": "dp = ",
    "strange.toml": "replicas = 2\n",
    "train.toml": "step = 3\n",
    "wrong.toml": 'steps = "many"\n',
    "cluster.toml": 'cluster = "8xAbacus"\n',
    "measured.json": '{"seconds": "long"}',
    "table.txt": "mine: 1 microbatch\nway: 0\n0: BW0.0 F0.0\n",
    "mine.py": "def build():\n    return 5\n\n\ndef fails():\n    raise KeyError('lost')\n"
    "\n\ndef mismatched():\n    import torch\n    return torch.nn.Linear(4, 4), torch.ones(2, 5)\n",
    "quantize.py": "import torch\n\n\ndef build():\n"
    "    return torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8))\n",
    "short.txt": "four",
    "long.txt": "a line of text\n" * 9,
    "quantized/config.json": '{"quantization_config": {}}',
    "syntax.py": "def build(:\n",
    "script.py": "print('here')\n",
    "nested/manifest.json": "[" * 100_000,
    "enormous.json": json.dumps(SIZES).replace(": 64,", f": {64 * 10**21},"),
    "enormous.toml": f"dp = 2\nbatch = {10**22}\nsequence = 64\n",
    "numbers.json": "[1, 2]",
    "negative.json": '{"seconds": -1}',
    "not.json": '{"seconds": NaN}',
    "torn.log": '{"event": "step"}\n[1]\n',
    "zeros.py": "\0",
    "nan.toml": 'cluster = "8xH100"\n[device]\nmemory = nan\n',
    "memry.toml": 'cluster = "8xH100"\n[device]\nmemry = 3\n',
    "flops.toml": 'cluster = "8xH100"\n[device]\nflops = 3\n',
    "device.toml": 'cluster = "8xH100"\ndevice = 3\n',
    "nothing.toml": "",
}
PLAN = "plan {f}/config.json --cluster 8xH100 --batch 8 --sequence 64"
PHASES = "plan {f}/config.json --cluster 8xH100 --phases train,generate --prompt-tokens 8 --new-tokens 8"
EXPLAIN = "explain {f}/config.json {f}/plan.toml --cluster 2xH100"
OK, FAILED, NOT_UNDERSTOOD = 0, 1, 2
AS_PROCESSES = (
    "trian", "train --mesh pp=9", "parallelize {f}/mine.py:mismatched --ranks 2",
    "plan {f}/none.json --cluster 8xH100 --batch 8 --sequence 64",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A command line, its expected exit code, and words that the output must have."""

    text: str
    code: int
    answer: str


TYPED = [
    # no such command, option or argument
    Line("trian", 2, "meshwright train"),
    Line("--steps 3", 2, "fix:"),
    Line("train --step 3", 2, "train --steps"),
    Line("train --rank=4", 2, "train --ranks"),
    Line("train --confg a.toml", 2, "train --config"),
    Line("train 5", 2, "no argument 5"),
    Line("run --process {f}/script.py", 2, "run --processes"),
    Line("schedule 1F1B --tabel", 2, "schedule --table"),
    Line(f"{PLAN} --presision bf16", 2, "plan --precision"),
    Line("predict {f}/config.json {f}/plan.toml --cluster 2xH100 --jsn", 2, "predict --json"),
    Line(f"{EXPLAIN} --htlm a.html", 2, "explain --html"),
    Line("checkpoint inspect {f} --jso", 2, "checkpoint --json"),
    Line("doctor --no-chek", 2, "doctor --no-check"),
    Line("doctor now", 2, "no argument now"),
    Line("conformance --levl 0", 2, "conformance --level"),
    Line("conformance --level 7", 2, "not a level from 0 to 5"),
    Line("conformance --level 3-1", 2, "not a level from 0 to 5"),
    Line("conformance --only nothing-like-this", 2, "no check of these levels has"),
    Line("conformance --import no.such.module", 2, "there is no module no.such.module"),
    Line("conformance --html {f}/none/a.html", 2, "No such folder"),
    Line("profile --dry-rn", 2, "profile --dry-run"),
    Line("parallelize {f}/mine.py:build --ranks 2 --clustr 4xH100", 2, "parallelize --cluster"),
    # values of a wrong kind
    Line("train --steps many", 2, "not a positive integer"),
    Line("train --steps 0", 2, "not a positive integer"),
    Line(f"{PHASES} --prompts 0", 2, "not a positive integer"),
    Line(f"{PHASES} --prompts 8 --phases generate", 2, "neither train nor train,generate"),
    Line(f"{PHASES} --prompts {10**22}", 1, "sizes are at most"),
    Line("train --seed -1", 2, "argument"),
    Line("train --tolerance little", 2, "not a non-negative number"),
    Line("train --tolerance nan", 2, "not a non-negative number"),
    Line("train --ranks 100000000000", 2, "more than one machine can run"),
    Line("train --mesh dp=100000", 2, "more than one machine can run"),
    Line("run --ranks 100000000000 {f}/script.py", 2, "more than one machine can run"),
    Line("schedule 1F1B --ranks 100000000000", 2, "more than one machine can run"),
    Line("schedule 1F1B --microbatches 100000000000", 2, "actions"),
    Line("schedule 1F1B --times 0,0,0", 2, "up to four non-negative numbers"),
    Line("plan {f}/infinite.json --cluster 8xH100 --batch 8 --sequence 64", 2, "1e400"),
    Line("plan {f}/headless.json --cluster 8xH100 --batch 8 --sequence 64", 1, "at least 1"),
    Line("train --mesh ep=2", 2, "AXIS=N"),
    Line("train --mesh dp", 2, "AXIS=N"),
    Line("train --mesh pp=2 --ranks 2", 2, "not allowed with"),
    Line("train --mesh pp=9", 2, "9 pipeline stages"),
    Line("train --hidden 33", 2, "33"),
    Line("train --save-every 5", 2, "folder="),
    Line("train --steps", 2, "expected one argument"),
    Line("run --ranks none {f}/script.py", 2, "not a positive integer"),
    Line("schedule 1F1B --times 1,-2", 2, "up to four non-negative numbers"),
    Line("schedule 1F1B --chunks 3", 2, "takes no --chunks"),
    Line("schedule 1F1B --width wide", 2, "not a positive integer"),
    Line("schedule 1F2B", 1, "1F1B"),
    Line("schedule zb-v", 1, "fix:   write ZB-V"),
    Line("schedule 1F1B --width 999999999", 2, "columns"),
    Line("train --mesh dp=2,dp=2", 2, "repeats an axis"),
    Line("train --seed 99999999999999999999999", 2, "not an integer from 0"),
    Line("train --seq 99999999999 --ranks 1 --layers 1 --hidden 32 --batch 1", 1, "--seq 128"),
    Line(f"{PLAN} --precision int4", 2, "invalid choice"),
    Line(f"{PLAN} --given tp", 2, "NAME=VALUE"),
    Line(f"{PLAN} --given tensor=2", 1, "tensor"),
    Line(f"{PLAN} --given batch=2", 2, "--batch"),
    Line(f"{PLAN} --given tp=2,tp=4", 2, "given twice"),
    Line(f"{PLAN} --given tp=99", 1, "tp = 99"),
    Line(f"{PLAN} --given ep=2", 1, "no experts"),
    Line(f"{PLAN} --given tp=nan", 1, "tp must be an integer"),
    Line(f"{PLAN} --batch 99999999999999999999999", 1, "sizes are at most"),
    Line(f"{PLAN} --ranks 16", 2, "--cluster 16xH100"),
    Line("plan {f}/enormous.json --cluster 8xH100 --batch 8 --sequence 64", 1, "sizes are at most"),
    Line("predict {f}/config.json {f}/enormous.toml --cluster 2xH100", 1, "integers are below"),
    Line("predict {f}/config.json {f}/plan.toml --cluster 1xH100", 2, "--cluster 2xH100"),
    Line("plan {f}/config.json --cluster 0xH100 --batch 8 --sequence 64", 1, "0 devices"),
    Line("plan {f}/config.json --cluster 99999999999999999999xH100 --batch 8 --sequence 64", 1, "at most"),
    Line("plan {f}/config.json --cluster 8xh1000 --batch 8 --sequence 64", 1, "fix:   write H100"),
    Line("plan {f}/config.json --cluster 8xH100,400G,100G --batch 8 --sequence 64", 1, "only one"),
    Line("plan {f}/config.json --cluster {f} --batch 8 --sequence 64", 1, "end in .toml"),
    Line("plan {f}/config.json --cluster {f}/nan.toml --batch 8 --sequence 64", 1, "NaN is not allowed"),
    Line("plan {f}/config.json --cluster {f}/memry.toml --batch 8 --sequence 64", 1, "the closest is memory"),
    Line("plan {f}/config.json --cluster {f}/flops.toml --batch 8 --sequence 64", 1, "[device]"),
    Line("plan {f}/config.json --cluster {f}/device.toml --batch 8 --sequence 64", 1, "device = 3"),
    Line("plan {f}/config.json --cluster {f}/nothing.toml --batch 8 --sequence 64", 1, "describes the devices"),
    Line("plan {f}/config.json --cluster H100 --batch 8 --sequence 64", 1, "64xH100"),
    Line("plan {f}/config.json --cluster 8xAbacus --batch 8 --sequence 64", 1, "Abacus"),
    Line(f"{EXPLAIN} --batch none", 2, "not a positive integer"),
    Line("checkpoint look {f}", 2, "invalid choice"),
    Line("checkpoint diff {f}", 2, "diff PATH OTHER"),
    Line("checkpoint convert {f} {f}/new --to pickle", 2, "invalid choice"),
    Line("profile --ranks none", 2, "not a positive integer"),
    Line("profile --seconds 0", 2, "not a positive number of seconds"),
    Line("parallelize {f}/mine.py:build --mesh dp", 2, "AXIS=N"),
    Line("parallelize {f}/mine.py:build --mesh dp=2,dp=2", 2, "AXIS=N"),
    Line("parallelize {f}/mine.py:build --mesh dp=2 --ranks 2", 2, "not allowed with"),
    Line("parallelize {f}/mine.py:build", 2, "the number of ranks is missing"),
    Line("quantize {f}/quantize.py:build --scheme w4a61 --dry-run", 2, "write w4a16"),
    Line("quantize {f}/quantize.py:build --group-size 3 --dry-run", 2, "leave out --group-size"),
    Line("quantize {f}/quantize.py:build --scheme w4a16 --dry-run", 1, "use group_size=8"),
    Line("quantize {f}/quantize.py:build --ignore Linear --dry-run", 1, "no layer is left"),
    Line("quantize {f}/quantize.py:build", 2, "--out DIR or --dry-run"),
    Line("quantize {f}/quantize.py:build --out {f}", 2, "exists already"),
    Line("quantize {f}/quantize.py:build --out {f}/config.json/new", 2, "can be written"),
    Line("quantize {f}/quantize.py:build --out {f}/not_made --scheme fp8", 2, "needs calibration data"),
    Line("quantize {f}/quantize.py:build --out {f}/not_made --scheme nf4", 2, "has no nf4"),
    Line("quantize {f}/quantize.py:build --out {f}/not_made --data {f}/none.txt", 2, "No such file"),
    Line("quantize {f}/quantize.py:build --out {f}/not_made --data {f}/short.txt", 2, "a smaller --sequence"),
    Line("quantize {f}/quantize.py:build --out {f}/not_made --data {f}/long.txt --sequence 8", 2, "the token 120"),
    Line("quantize {f}/quantize.py:build --out {f}/not_made --data {f}/mine.py:build", 2, "returns a int"),
    Line("quantize {f}/mine.py:build --out {f}/not_made", 2, "returns a int"),
    Line("quantize {f}/none --dry-run", 2, "no such folder"),
    Line("quantize {f} --dry-run", 2, "config.json and safetensors"),
    Line("quantize {f}/quantized --dry-run", 2, "quantized already"),
    # missing arguments
    Line("quantize", 2, "MODEL"),
    Line("run", 2, "SCRIPT"),
    Line("schedule", 2, "NAME"),
    Line("plan", 2, "CONFIG"),
    Line("plan {f}/config.json --batch 8 --sequence 64", 2, "--cluster"),
    Line(PHASES, 2, "pass --prompts"),
    Line(f"{PHASES} --prompts 8 --batch 8", 2, "leave out --batch"),
    Line(f"{PHASES} --prompts 8 --given batch=8", 2, "leave out --given batch"),
    Line(f"{PLAN} --prompts 8", 2, "--phases train,generate"),
    Line(PHASES.replace("config", "experts") + " --prompts 8", 1, "with experts"),
    Line("predict {f}/config.json", 2, "PLAN"),
    Line("explain", 2, "CONFIG"),
    Line("checkpoint", 2, "ACTION"),
    Line("parallelize", 2, "MODEL"),
    # files that are missing, or of another kind
    Line("run {f}/none.py", 2, "no file"),
    Line("run --trace {f} {f}/script.py", 2, "Is a directory"),
    Line("run {f}/syntax.py", 1, "line 1"),
    Line("run {f}/zeros.py", 1, "null bytes"),
    Line("run --processes {f}/syntax.py", 1, "line 1"),
    Line("profile --out {f}/none/here.toml", 2, "No such folder"),
    Line("parallelize {f}/mine.py:mismatched --ranks 2 --out {f}", 2, "Is a directory"),
    Line("train --steps 1 --ranks 1 --log {f}/config.json/log", 1, "the log"),
    Line("train --steps 1 --ranks 1 --save {f}/config.json", 1, "exists"),
    Line("parallelize {f}/mine.py:mismatched --ranks 2", 1, "module(*batch)"),
    Line("train --config {f}/none.toml", 2, "No such file"),
    Line("train --config {f}/none.py:f", 2, "no such file"),
    Line("train --config {f}/train.toml", 2, "fix: write steps"),
    Line("train --config {f}/wrong.toml", 2, "not a positive integer"),
    Line("train --config {f}/broken.toml", 2, "lines of TOML"),
    Line("train --config {f}/mine.py:build", 2, "returns a int"),
    Line("train --config {f}/mine.py:bild", 2, "mine.py:build"),
    Line("train --config {f}/mine.py:fails", 1, "mine.py:6"),
    Line("train --config {f}/syntax.py:build", 1, "syntax.py:1"),
    Line("plan {f}/none.json --cluster 8xH100 --batch 8 --sequence 64", 2, "No such file"),
    Line("plan {f}/broken.json --cluster 8xH100 --batch 8 --sequence 64", 2, "config.json"),
    Line("plan {f}/empty.json --cluster 8xH100 --batch 8 --sequence 64", 1, "hidden_size"),
    Line("plan {f}/list.json --cluster 8xH100 --batch 8 --sequence 64", 2, "config.json"),
    Line("plan {f} --cluster 8xH100 --batch 8 --sequence 64", 2, "a folder"),
    Line("plan {f}/config.json --cluster {f}/none.toml --batch 8 --sequence 64", 1, "No such file"),
    Line("plan {f}/config.json --cluster {f}/broken.toml --batch 8 --sequence 64", 1, "TOML"),
    Line("plan {f}/config.json --cluster {f}/cluster.toml --batch 8 --sequence 64", 1, "Abacus"),
    Line(f"{PLAN} --out {{f}}/none/plan.toml", 2, "No such folder"),
    Line("predict {f}/config.json {f}/none.toml --cluster 2xH100", 2, "No such file"),
    Line("predict {f}/config.json {f}/broken.toml --cluster 2xH100", 1, "dp = 8"),
    Line("predict {f}/config.json {f}/strange.toml --cluster 2xH100", 1, "replicas"),
    Line(f"{EXPLAIN} --measured {{f}}/none.json", 2, "No such file"),
    Line(f"{EXPLAIN} --measured {{f}}/measured.json", 2, "seconds"),
    Line(f"{EXPLAIN} --measured {{f}}/numbers.json", 2, "a list"),
    Line(f"{EXPLAIN} --measured {{f}}/negative.json", 2, "not a positive number"),
    Line(f"{EXPLAIN} --measured {{f}}/not.json", 2, "finite"),
    Line(f"{EXPLAIN} --measured {{f}}/torn.log", 2, "a list"),
    Line(f"{EXPLAIN} --measured {{f}}/empty.json", 2, "no numbers"),
    Line(f"{EXPLAIN} --alone --html {{f}}/none/a.html", 2, "No such folder"),
    Line("schedule {f}/table.txt", 1, "waits for"),
    Line("schedule 1F1B --svg {f}/none/a.svg", 2, "No such folder"),
    Line("checkpoint inspect {f}/none", 1, "none"),
    Line("checkpoint verify {f}/config.json", 1, "config.json"),
    Line("checkpoint verify {f}/nested", 1, "is truncated"),
    Line("parallelize {f}/none.py:build --ranks 2", 2, "no such file"),
    Line("parallelize {f}/mine.py:build --ranks 2", 2, "returns a int"),
    Line("parallelize {f}/mine.py:fails --ranks 2", 1, "mine.py:6"),
    Line("parallelize {f}/broken.json --ranks 2", 2, "file.py:function"),
    Line("parallelize {f}/empty.json --ranks 2", 2, "model_type"),
]
LINES = [*(Line(f"{name} --help", 0, "usage:") for name in COMMANDS), *TYPED]


def make_files(folder: Path) -> None:
    """Write the files that the lines mention."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def fault_of(line: Line, folder: Path) -> str:
    """Return the fault of the response to a line, or ""."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([word.format(f=folder) for word in line.text.split()])
        except Exception as error:
            return f"{line.text}: raised {type(error).__name__}: {error}"
    return first_fault(line, code, out.getvalue(), err.getvalue())


def first_fault(line: Line, code: int, out: str, err: str) -> str:
    """Return the first fault: exit code, traceback, missing words, no remedy, or more than one message."""
    said = out if line.code == OK else err
    faults = {
        f"exit code {code} instead of {line.code}": code != line.code,
        "a traceback": "Traceback" in out + err,
        f"no word of {line.answer!r} in {said!r}": line.answer not in said,
        "nothing to write instead": line.code != OK and "fix:" not in err,
        "more than one message": err.count("fix:") > 1,
        "a mistake answered on standard output": bool(line.code != OK and out),
    }
    return next((f"{line.text}: {fault}" for fault, found in faults.items() if found), "")


def process_faults(folder: Path) -> Iterator[str]:
    """Yield the same faults for lines that run as processes of their own."""
    known = {line.text: line for line in LINES}
    for text in AS_PROCESSES:
        words = [word.format(f=folder) for word in text.split()]
        done = subprocess.run([sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, check=False)
        fault = first_fault(known[text], done.returncode, done.stdout, done.stderr)
        if fault:
            yield fault


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of lines with a wrong response."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        found = [fault for line in LINES if (fault := fault_of(line, folder))]
        found += [] if quick else list(process_faults(folder))
    tried = len(LINES) + (0 if quick else len(AS_PROCESSES))
    return {
        "name": "cli",
        "value": len(found),
        "goal": f"none of {tried} lines without the right exit code, one clear message and what to write",
        "ok": not found,
        "details": {"lines": tried, "wrong": found},
    }
