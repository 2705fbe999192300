"""Parse the command line, and name the closest match for an unknown word."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import prod
from typing import NoReturn

from meshwright.layout import escaped

AXES = ("pp", "dp", "tp")
COMMANDS = {
    "train": "train a byte-level language model on a mesh of ranks, and on one device for comparison",
    "run": "run a script on several ranks of this machine",
    "schedule": "draw a pipeline schedule, from its name or a file, and show its duration",
    "plan": "find the fastest plan for a model on a cluster, without using the cluster",
    "explain": "explain the time and memory of a training step under a plan, and compare other plans",
    "predict": "predict a training step under a plan: seconds, share of peak performance, memory of the fullest rank",
    "checkpoint": "show the contents of a checkpoint, verify it, compare two, or convert it to another format",
    "parallelize": "find the best plan for a model, and print the lines that make the model parallel",
    "quantize": "quantize a language model by the work of several ranks, and write it as compressed-tensors",
    "profile": "measure this machine, and write a cluster file for plan, predict and explain",
    "doctor": "show what this machine has and lacks, and compare two ranks with one device",
    "conformance": "check a device: operators, simulated ranks, transport and training; say what it may be used for",
}
FAILS = {
    "train": "the run failed, or the losses of the two runs differ by more than --tolerance",
    "run": "the script failed",
    "schedule": "the schedule is unknown, or it cannot run",
    "plan": "no plan fits, or the model or the cluster is invalid",
    "explain": "the model, the plan or the cluster is invalid",
    "predict": "the model, the plan or the cluster is invalid",
    "checkpoint": "a checkpoint is damaged or missing, or two checkpoints differ",
    "parallelize": "no plan fits, or the model's file or function fails",
    "quantize": "the model, the scheme or the data does not fit, or the folder cannot be written",
    "profile": "the measuring ranks failed",
    "doctor": "a required part is missing, or two ranks differ from one device",
    "conformance": "a check failed, or no check was run",
}
"""The meaning of exit code 1, by command."""
CONFIG = "--config"
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
"""Precisions of plans, as `meshwright.search` knows them, which needs torch."""
MOST_RANKS = 4096
"""Most ranks on one machine, as threads or processes."""

MOST_COLUMNS = 100_000


def exit_codes(command: str = "") -> str:
    failed = FAILS.get(command, "the command failed; meshwright COMMAND --help names the causes")
    return f"""\
exit codes:
  0    success
  1    {failed}
  2    the command line is invalid
  130  interrupted (128 + the signal's number)
  143  ended by SIGTERM; a run with --save has first finished and saved its step
  else the exit code of the script, or of the first process that failed
"""


class UsageError(Exception):
    """A command line that was not understood; the text says what to write."""

    def __init__(self, text: str) -> None:
        if not text.replace("\n", "").isprintable():
            text = escaped(text, keep_lines=True)
        super().__init__(text)


class Parser(argparse.ArgumentParser):
    """An argparse parser that takes no abbreviations and raises `UsageError` instead of ending the process."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n  fix: see {self.prog} --help")

    @property
    def options(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        return self._actions

    def rivals(self, action: argparse.Action) -> set[str]:
        """Return the options that cannot be given together with this one."""
        groups = [g._group_actions for g in self._mutually_exclusive_groups if action in g._group_actions]
        return {name for group in groups for other in group if other is not action for name in other.option_strings}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command and its settings. `--help` raises SystemExit; anything unknown raises UsageError."""
    if not argv or argv[0].startswith("-"):
        top_parser().parse_args(list(argv) or ["--help"])
    command, *rest = argv
    if command not in COMMANDS:
        raise UsageError(unknown_word_message("meshwright", "command", command, COMMANDS))
    parser = PARSERS[command]()
    if CONFIG in parser.options:
        from meshwright.cli.console.config_file import with_config

        with_config(parser, rest)
    settings, strangers = parser.parse_known_args(rest)
    for stranger in strangers:
        kind = "option" if stranger.startswith("-") else "argument"
        raise UsageError(unknown_word_message(parser.prog, kind, stranger.partition("=")[0], parser.options))
    settings.command = command
    return settings


def unknown_word_message(prog: str, kind: str, word: str, known: Iterable[str]) -> str:
    """Return the message for an unknown word, with the closest match.

    >>> print(unknown_word_message("meshwright", "command", "trian", ["train", "run"]))
    meshwright: there is no command trian
      fix: run meshwright train
    """
    nearest = get_close_matches(word, list(known), n=1, cutoff=0.5) or ["--help"]
    return f"{prog}: there is no {kind} {word}\n  fix: run {prog} {nearest[0]}"


def top_parser() -> Parser:
    commands = "\n".join(f"  {name:11} {what}" for name, what in COMMANDS.items())
    parser = Parser(
        "meshwright",
        "Automatic parallel training on PyTorch.",
        f"commands:\n{commands}\n\nRun meshwright COMMAND --help for the options of one command.\n\n{exit_codes()}",
    )
    parser.usage = "meshwright COMMAND ..."
    parser.add_argument("--version", action="version", version=version())
    return parser


def version() -> str:
    from importlib.metadata import version  # costs 30 ms, and only this option wants it

    return f"meshwright {version('meshwright')}"


def train_parser() -> Parser:
    parser = Parser("meshwright train", f"{COMMANDS['train'].capitalize()}; print both losses.", exit_codes("train"))
    add_config(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=positive, default=256, metavar="N", help="channels (256)")
    model.add_argument("--layers", type=positive, default=6, metavar="N", help="blocks (6)")
    work = parser.add_argument_group("work")
    work.add_argument("--steps", type=positive, default=50, metavar="N", help="optimizer steps (50)")
    work.add_argument("--batch", type=positive, default=16, metavar="N", help="sequences per step (16)")
    work.add_argument(
        "--microbatches", type=positive, default=4, metavar="N", help="microbatches per step of a pipeline (4)"
    )
    work.add_argument("--seq", type=positive, default=128, metavar="N", help="bytes per sequence (128)")
    work.add_argument(
        "--seed", type=non_negative, default=0, metavar="N", help="seed of the weights and the batches (0)"
    )
    ranks = parser.add_argument_group("ranks")
    size = ranks.add_mutually_exclusive_group()
    size.add_argument("--mesh", type=mesh, metavar="AXES", help="axis sizes; missing axes are 1 (pp=2,dp=2,tp=2)")
    size.add_argument("--ranks", type=local_ranks, metavar="N", help="number of ranks, distributed over the axes")
    ranks.add_argument("--processes", action="store_true", help="run one process per rank, not simulated ranks")
    add_trace(parser)
    kept = parser.add_argument_group("saved run, without the comparison with one device")
    kept.add_argument(
        "--save", metavar="FOLDER", help="resume from the latest checkpoint; save at the end and at SIGTERM"
    )
    kept.add_argument("--save-every", type=positive, metavar="N", help="also save every N steps; needs --save")
    kept.add_argument("--log", metavar="FILE", help="write one line of JSON per step (FOLDER/log.jsonl)")
    kept.add_argument("--tensorboard", metavar="FOLDER", help="write curves; needs the package tensorboard")
    answer = parser.add_argument_group("answer")
    answer.add_argument(
        "--tolerance", type=tolerance, default=1e-4, metavar="X", help="allowed relative difference (1e-4)"
    )
    answer.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run_parser() -> Parser:
    parser = Parser("meshwright run", f"{COMMANDS['run'].capitalize()}.", exit_codes("run"))
    options = "[--ranks N] [--processes] [--auto] [--all-ranks] [--trace FILE]"
    parser.usage = f"meshwright run {options} SCRIPT [ARGUMENT ...]"
    parser.add_argument("--ranks", type=local_ranks, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--processes", action="store_true", help="run one process per rank, not simulated ranks")
    parser.add_argument("--auto", action="store_true", help="plan and distribute the modules of a script without marks")
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="show the output of all ranks, each line with its rank; default: rank 0",
    )
    add_trace(parser)
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def schedule_parser() -> Parser:
    parser = Parser("meshwright schedule", f"{COMMANDS['schedule'].capitalize()}.", exit_codes("schedule"))
    parser.add_argument(
        "name", metavar="NAME", help="a schedule such as 1F1B, a file with a table, or list to show all names"
    )
    shape = parser.add_argument_group("shape")
    shape.add_argument("--ranks", type=local_ranks, default=4, metavar="N", help="ranks of the pipeline (4)")
    shape.add_argument("--microbatches", type=positive, default=8, metavar="N", help="microbatches per step (8)")
    shape.add_argument("--chunks", type=positive, default=2, metavar="N", help="chunks per rank (2)")
    shape.add_argument(
        "--times",
        type=times,
        default=(1.0, 1.0, 1.0, 0.0),
        metavar="F,B,W,MESSAGE",
        help="seconds per action (1,1,1,0)",
    )
    answer = parser.add_argument_group("answer")
    answer.add_argument("--table", action="store_true", help="print the table instead of a picture")
    answer.add_argument("--json", action="store_true", help="print one JSON object")
    answer.add_argument("--svg", metavar="FILE", help="write the picture as SVG")
    answer.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    answer.add_argument("--width", type=column_count, default=100, metavar="N", help="columns of the picture (100)")
    return parser


def plan_parser() -> Parser:
    parser = Parser("meshwright plan", f"{COMMANDS['plan'].capitalize()}.", exit_codes("plan"))
    add_config(parser)
    add_model(parser)
    add_cluster(parser)
    parser.add_argument("--ranks", type=positive, metavar="N", help="number of devices (all of the cluster)")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences per step")
    parser.add_argument("--sequence", type=positive, metavar="N", help="tokens per sequence")
    add_generation(parser)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="precision of matrix products (bf16)")
    parser.add_argument(
        "--given", type=plan_decisions, default={}, metavar="NAME=VALUE,...", help="fixed choices, such as tp=8,zero=1"
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan of training as TOML")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def predict_parser() -> Parser:
    parser = Parser("meshwright predict", f"{COMMANDS['predict'].capitalize()}.", exit_codes("predict"))
    add_model(parser)
    parser.add_argument("plan", metavar="PLAN", help="a plan in TOML or JSON")
    add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def explain_parser() -> Parser:
    parser = Parser("meshwright explain", f"{COMMANDS['explain'].capitalize()}.", exit_codes("explain"))
    add_model(parser)
    parser.add_argument("plan", metavar="PLAN", help="a plan in TOML or JSON")
    add_cluster(parser)
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences per step (those of the plan)")
    parser.add_argument("--sequence", type=positive, metavar="N", help="tokens per sequence (those of the plan)")
    parser.add_argument("--measured", metavar="FILE", help="measured values: JSON, or the log of a run")
    parser.add_argument("--alone", action="store_true", help="do not search for other plans")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def checkpoint_parser() -> Parser:
    parser = Parser("meshwright checkpoint", f"{COMMANDS['checkpoint'].capitalize()}.", exit_codes("checkpoint"))
    parser.usage = "meshwright checkpoint inspect|verify PATH, diff PATH OTHER, convert PATH NEW --to FORMAT"
    actions = ("inspect", "verify", "diff", "convert")
    parser.add_argument("action", choices=actions, metavar="ACTION", help=", ".join(actions))
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="a checkpoint, a folder of steps, safetensors files, or torch's"
    )
    parser.add_argument(
        "--to",
        choices=("meshwright", "safetensors", "dcp"),
        default="meshwright",
        metavar="FORMAT",
        help="format that convert writes: meshwright (the default), safetensors, dcp",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PREFIX",
        help="convert only the names below PREFIX, and remove it",
    )
    parser.add_argument(
        "--tolerance", type=tolerance, default=0.0, metavar="X", help="absolute difference that diff accepts (0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def doctor_parser() -> Parser:
    parser = Parser("meshwright doctor", f"{COMMANDS['doctor'].capitalize()}.", exit_codes("doctor"))
    parser.add_argument("--no-check", action="store_true", help="show the findings only; run no ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def conformance_parser() -> Parser:
    parser = Parser("meshwright conformance", f"{COMMANDS['conformance'].capitalize()}.", exit_codes("conformance"))
    parser.add_argument("--device", metavar="TYPE", help="type of device, such as xpu (the accelerator, or else cpu)")
    found = "levels: 0 device, 1 operators, 2 simulated ranks, 3 processes, 4 training, 5 speed (0-5)"
    parser.add_argument("--level", type=levels, default=levels("0-5"), metavar="N-M", help=found)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only checks whose names contain this text, in any case"
    )
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="module that registers the device; each worker imports it",
    )
    shared = "let processes share devices, and communicate through the host's memory"
    parser.add_argument("--through-host", action="store_true", help=shared)
    most = "most processes of a check (4 if there are as many devices or cores, else 2)"
    parser.add_argument("--processes", type=positive, metavar="N", help=most)
    parser.add_argument("--html", metavar="FILE", help="write a self-contained HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parallelize_parser() -> Parser:
    parser = Parser("meshwright parallelize", f"{COMMANDS['parallelize'].capitalize()}.", exit_codes("parallelize"))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="file.py:function, which returns a module and a batch (and a loss), or a model's config.json",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--mesh", type=axes, metavar="AXES", help="axis sizes, such as dp=2,tp=4")
    size.add_argument("--ranks", type=positive, metavar="N", help="number of ranks; the search chooses the mesh")
    parser.add_argument(
        "--cluster", metavar="CLUSTER", help="such as '64xH100', or a TOML file (the cores of this machine)"
    )
    parser.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="sequences per step, for a config.json (8)"
    )
    parser.add_argument(
        "--sequence", type=positive, default=128, metavar="N", help="tokens per sequence, for a config.json (128)"
    )
    parser.add_argument("--out", metavar="FILE", help="also write the lines to a Python file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def quantize_parser() -> Parser:
    parser = Parser("meshwright quantize", f"{COMMANDS['quantize'].capitalize()}.", exit_codes("quantize"))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a model's folder, or file.py:function, which returns a module",
    )
    scheme = parser.add_argument_group("scheme")
    scheme.add_argument("--scheme", default="int8", metavar="NAME", help="a preset, such as w4a16-gptq (int8)")
    scheme.add_argument("--group-size", type=positive, metavar="N", help="weights that share a scale (of the preset)")
    scheme.add_argument(
        "--ignore",
        action="append",
        metavar="NAME",
        help="also leave out layers of this name, class or re:PATTERN (lm_head)",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="FILE", help="a text, or file.py:function, which returns batches")
    data.add_argument("--sequence", type=positive, default=512, metavar="N", help="tokens per sequence of a text (512)")
    data.add_argument("--samples", type=positive, default=128, metavar="N", help="most batches for calibration (128)")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--ranks", type=local_ranks, default=1, metavar="N", help="number of ranks (1)")
    ranks.add_argument("--processes", action="store_true", help="run one process per rank, not simulated ranks")
    answer = parser.add_argument_group("answer")
    answer.add_argument("--out", metavar="DIR", help="write the quantized model to this new folder")
    answer.add_argument("--resume", metavar="DIR", help="keep calibrated blocks in this folder, and read those there")
    answer.add_argument("--dry-run", action="store_true", help="show the layers and the sizes; quantize nothing")
    answer.add_argument("--html", metavar="FILE", help="write a self-contained HTML page")
    answer.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def profile_parser() -> Parser:
    parser = Parser("meshwright profile", f"{COMMANDS['profile'].capitalize()}.", exit_codes("profile"))
    parser.add_argument("--ranks", type=local_ranks, metavar="N", help="number of processes (one per GPU, or per core)")
    parser.add_argument("--seconds", type=seconds, default=0.2, metavar="X", help="seconds per measurement (0.2)")
    parser.add_argument("--out", metavar="FILE", help="write the cluster as TOML to this file; default: print it")
    parser.add_argument("--products", action="store_true", help="measure the products of quantized layers instead")
    parser.add_argument("--dry-run", action="store_true", help="show the planned measurements and their duration")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every measurement")
    return parser


def add_config(parser: Parser) -> None:
    parser.add_argument(
        CONFIG, metavar="FILE", help="options in TOML, or file.py:function; the command line overrides them"
    )


def add_trace(parser: Parser) -> None:
    parser.add_argument("--trace", metavar="FILE", help="write a trace of all ranks for ui.perfetto.dev")


def add_model(parser: Parser) -> None:
    parser.add_argument("model", metavar="CONFIG", help="a model's config.json")
    parser.add_argument(
        "--ahead",
        type=tokens_ahead,
        metavar="N",
        help="tokens that are predicted besides the next one (num_nextn_predict_layers of CONFIG, or 0)",
    )
    parser.add_argument(
        "--imbalance", type=float, metavar="X", help="tokens of the fullest rank's experts, relative to the average (1)"
    )


def add_generation(parser: Parser) -> None:
    sizes = parser.add_argument_group("steps that generate what they train on, instead of --batch and --sequence")
    sizes.add_argument("--phases", type=phases, default=("train",), metavar="NAMES", help="train,generate (train)")
    sizes.add_argument("--prompts", type=positive, metavar="N", help="prompts per step")
    sizes.add_argument("--samples", type=positive, metavar="N", help="samples of each prompt (1)")
    sizes.add_argument("--prompt-tokens", type=positive, metavar="N", help="tokens of a prompt")
    sizes.add_argument("--new-tokens", type=positive, metavar="N", help="tokens that are generated for each sample")


def add_cluster(parser: Parser) -> None:
    parser.add_argument(
        "--cluster", required=True, metavar="CLUSTER", help="such as '64xH100, 8 per node, 400G', or a TOML file"
    )


PARSERS = {
    "train": train_parser, "run": run_parser, "schedule": schedule_parser, "plan": plan_parser,
    "predict": predict_parser, "explain": explain_parser,
    "checkpoint": checkpoint_parser, "doctor": doctor_parser,
    "parallelize": parallelize_parser, "quantize": quantize_parser,
    "profile": profile_parser, "conformance": conformance_parser,
}  # fmt: skip


def plan_decisions(text: str) -> dict[str, object]:
    """Return the given decisions of a plan: integers, true and false, and words.

    >>> plan_decisions("tp=8,sequence_parallel=true,schedule=ZB-1p")
    {'tp': 8, 'sequence_parallel': True, 'schedule': 'ZB-1p'}
    """
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equal, value = part.partition("=")
        if not (name and equal and value):
            raise argparse.ArgumentTypeError(f"{part} is not of the form NAME=VALUE")
        if name.strip() in found:
            raise argparse.ArgumentTypeError(f"{name.strip()} is given twice")
        known = {"true": True, "false": False}
        found[name.strip()] = known.get(value, int(value) if value.isdecimal() else value)
    return found


def phases(text: str) -> tuple[str, ...]:
    """Return the phases of a step.

    >>> phases("train,generate")
    ('train', 'generate')
    """
    found = tuple(text.split(","))
    if found not in (("train",), ("train", "generate")):
        raise argparse.ArgumentTypeError(f"{text} is neither train nor train,generate")
    return found


def levels(text: str) -> range:
    """Return the levels of conformance: one, or the first and the last.

    >>> list(levels("2")), list(levels("0-3"))
    ([2], [0, 1, 2, 3])
    """
    first, dash, last = text.partition("-")
    digits = set("012345")
    if not {first, last if dash else first} <= digits or (dash and last < first):
        raise argparse.ArgumentTypeError(f"{text} is not a level from 0 to 5, or two such as 0-3")
    return range(int(first), int(last or first) + 1)


def times(text: str) -> tuple[float, float, float, float]:
    """Return the seconds of F, B, W and a message; missing ones at the end are 1, 1, 1 and 0.

    >>> times("3,4")
    (3.0, 4.0, 1.0, 0.0)
    """
    words = text.split(",")
    try:
        given = [float(word) for word in words]
    except ValueError:
        given = [-1.0]
    filled = given + [1.0, 1.0, 1.0, 0.0][len(given) :]
    if len(given) > 4 or min(given) < 0 or not 0 < sum(filled) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a list of up to four non-negative numbers, such as 3,4,2,0.5")
    f, b, w, message = filled
    return f, b, w, message


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def tokens_ahead(text: str) -> int:
    return 0 if text == "0" else positive(text)


def local_ranks(text: str) -> int:
    return check_rank_count(positive(text))


def check_rank_count(ranks: int) -> int:
    """Return the number of ranks. Raises ArgumentTypeError for more than one machine can run."""
    if ranks > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{ranks} ranks are more than one machine can run ({MOST_RANKS})")
    return ranks


def column_count(text: str) -> int:
    found = positive(text)
    if found > MOST_COLUMNS:
        raise argparse.ArgumentTypeError(f"{text} columns are more than the limit of {MOST_COLUMNS}")
    return found


def tolerance(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a non-negative number")
    return found


def non_negative(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an integer from 0 to {2**63 - 1}")
    return int(text)


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return found


def axes(text: str) -> dict[str, int]:
    """Return the sizes of named axes.

    >>> axes("dp=2,tp=4")
    {'dp': 2, 'tp': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size or name in found:
            raise argparse.ArgumentTypeError(f"{part} is not of the form AXIS=N, or repeats an axis")
        found[name] = positive(size)
    return found


def mesh(text: str) -> tuple[int, int, int]:
    """Return the sizes of the axes pp, dp and tp; an axis that is not named has size 1.

    >>> mesh("dp=4,tp=2")
    (1, 4, 2)
    """
    given = axes(text)
    if strange := [name for name in given if name not in AXES]:
        raise argparse.ArgumentTypeError(f"{strange[0]} is not of the form AXIS=N with an axis of {', '.join(AXES)}")
    sizes = dict.fromkeys(AXES, 1) | given
    check_rank_count(prod(sizes.values()))
    return sizes["pp"], sizes["dp"], sizes["tp"]


def share_out(ranks: int) -> tuple[int, int, int]:
    """Return a mesh for the number of ranks: a factor 2 to each of tp and pp if possible, the rest to dp.

    >>> share_out(8), share_out(6), share_out(1)
    ((2, 2, 2), (1, 3, 2), (1, 1, 1))
    """
    tp = 2 if ranks % 2 == 0 and ranks > 2 else 1
    pp = 2 if ranks % 8 == 0 else 1
    return (pp, ranks // (tp * pp), tp)
