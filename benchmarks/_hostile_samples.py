"""Good samples of every input that the package reads, and the functions that read them."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw
from benchmarks._quantized_forms import Nf4, write
from meshwright.checkpoint import HeldTensor
from meshwright.cli.commands.explain import _measured
from meshwright.cli.commands.plan import read_model
from meshwright.cli.commands.schedule import asked_schedule
from meshwright.cli.console.config_file import read_config
from meshwright.cli.console.files import read_object, read_text
from meshwright.cli.console.parser import parse
from meshwright.cost import cluster
from meshwright.engine.recording.strategy_toml import strategy_from_toml
from meshwright.engine.static.program_cache import VARIABLE, ProgramCache, _key
from meshwright.engine.training.random_states import NAME as RANDOM
from meshwright.engine.training.random_states import _written as written_random
from meshwright.engine.training.random_states import check_random
from meshwright.graph import load_program as load_program
from meshwright.graph import parse_layouts
from meshwright.graph.rewriting.rule_arguments import parse_shapes
from meshwright.layout import parse_layout, parse_spec, read_dtype
from meshwright.pipeline import check_schedule, parse_schedule
from meshwright.pipeline.table.action import parse_action
from meshwright.reshard import parse_step
from meshwright.search import parse_mesh_plan, parse_plan
from meshwright.spmd.notation.equation import parse_rule

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
PLAN = 'dp = 8\ntp = 4\npp = 2\nbatch = 256\nschedule = "1F1B"\nrecompute = "full"\nsequence_parallel = true\n'
MESH_PLAN = """\
seconds = 0.5
bytes = 1e9
zero = 1
recompute = ["blocks.*"]
split = ["layers.4"]
schedule = "1F1B"
microbatches = 4
[mesh]
pp = 2
dp = 2
[layouts]
"0.weight" = "f32[32@dp, 8]"
batch_0 = "f32[16@dp, 8]"
"""
SCHEDULE = "mine: 2 microbatches\nway: 0 1\n0: F0.0 F1.0 BW0.0 BW1.0\n1: F0.1 BW0.1 F1.1 BW1.1\n"
CLUSTER = """\
cluster = "64xH100, 8 per node, 400G"
[device]
memory = 96
reach = 0.57
flops = { bf16 = 989.5, float8_e4m3fn = 1979 }
[outside]
latency = 10
lines = [1.0, 2.0]
"""
STRATEGY = """\
compiler = "inductor"
[sharding]
enable = true
stage = 2
[pipeline]
enable = true
accumulate_steps = 4
"""
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_key_value_heads": 2,
    "model_type": "llama",
    "tie_word_embeddings": True,
}
LOG = '{"event": "step", "seconds": 1.5, "peak_memory": 7}\n{"event": "step", "seconds": 1.0, "peak_memory": 9}\n'


def _checked_schedule(text: str) -> Any:
    check_schedule(parse_schedule(text), stale=True)


def _spec(text: str) -> Any:
    spec = parse_spec(text, MESH)
    return spec.nbytes, spec.local_shape(0), repr(spec)


Row = tuple[Any, ...]


def _read_random(text: str) -> None:
    """Check the states of random generators that a checkpoint may hold."""
    check_random(
        {RANDOM: HeldTensor(torch.frombuffer(bytearray(text.encode("utf-8", "surrogateescape")), dtype=torch.uint8))}
    )


TEXTS: dict[str, Row] = {
    "layout": (
        lambda text: repr(parse_layout(text)),
        ("layout._text:parse_layout", "layout._text:read_strides"),
        "[8@dp, :, 3 * 512@tp] +ep:max ~cp",
        "[@dp, :, @tp@cp] +ep",
    ),
    "spec": (
        _spec,
        ("layout._spec:parse_spec", "layout._text:parse_sized"),
        "f32[8@dp, 1024, 1536] ~tp",
        "f32[8, 3 * 512@tp] +dp",
        "bf16[8@dp@tp, 4] strides (1, 8)",
    ),
    "dtype": (read_dtype, ("layout._text:read_dtype",), "bf16", "float8_e4m3fn"),
    "step": (
        lambda text: parse_step(text, MESH),
        ("reshard._parse:parse_step",),
        "ReduceScatter(dp tp, dim 0 over dp max)",
        "AllToAll([@dp, :, 3 * 4@tp])",
        "View(f32[8@dp, 4])",
        "AllGather(dp tp, dim 0; tp, dim 1)",
    ),
    "rule": (
        parse_rule,
        ("spmd.notation.equation:parse_rule",),
        "b h s d!, b h t! d!, b h t! e -> b h s e",
        "... k * n k + n -> ... n",
        "v! d | ... -> ... d",
    ),
    "shapes": (
        lambda text: parse_shapes(text, ["x", "t"]),
        ("graph.rewriting.rule_arguments:parse_shapes",),
        "n c, int n < c",
    ),
    "layouts": (
        lambda text: parse_layouts(text, {"w": MESH, "batch_0": MESH}),
        ("graph.program.layouts:parse_layouts",),
        "w        f32[8@dp, 4]  # mark\nbatch_0  f32[16@dp, 8]\n",
    ),
    "schedule": (_checked_schedule, ("pipeline.table.parser:parse_schedule",), SCHEDULE),
    "action": (parse_action, ("pipeline.table.action:parse_action",), "F4.0&B1.3", ">F0.1", "BW10.1:3"),
    "plan": (
        parse_plan,
        ("search.plan_data.plan:parse_plan", "search.plan_data.plan:read_text"),
        PLAN,
        '{"dp": 8, "batch": 256}',
    ),
    "mesh plan": (
        parse_mesh_plan,
        ("search.module_plans.mesh_plan_parser:parse_mesh_plan",),
        MESH_PLAN,
        '{"mesh": {"dp": 2}, "layouts": {"batch_0": "f32[8@dp, 4]"}}',
    ),
    "strategy": (strategy_from_toml, ("engine.recording.strategy_toml:strategy_from_toml",), STRATEGY),
    "cluster": (cluster, ("cost._describe:cluster",), "64xA100-40GB, 8 per node, 200G", "8xH100 + 8xA100, EFA-400"),
    "random": (_read_random, ("engine.training.random_states:check_random",), written_random().decode()),
}
"""Reader of a text → the function, the functions that it covers, and good texts."""


def _configured(path: Path) -> Any:
    return read_config(str(path)), parse(["train", "--config", str(path)])


PLAN_READERS = (
    "cli.console.files:read_text", "cli.commands.explain:explain", "cli.commands.plan:predict_step",
    "cli.console.language_model:read_batches",
)  # fmt: skip
FILES: dict[str, Row] = {
    "cluster file": (lambda path: cluster(str(path)), ("cost._describe:_from_file", "cost._describe:cluster"), CLUSTER),
    "model": (
        lambda path: read_model(Namespace(model=str(path), imbalance=None, ahead=None)),
        (
            *("cli.commands.plan:read_model", "cli.console.files:read_object", "cli.commands.parallelize:_model"),
            "cli.console.language_model:_classes",
        ),
        json.dumps(CONFIG),
    ),
    "measured": (
        lambda path: _measured(str(path)),
        ("cli.commands.explain:_measured", "cli.commands.explain:_numbers"),
        '{"seconds": 1.2, "bytes": 7e10}',
        LOG.splitlines()[0] + "\n" + LOG,
    ),
    "configuration": (
        _configured,
        ("cli.console.config_file:read_config",),
        "steps = 100\nbatch = 8\nmesh = {pp = 2, dp = 2, tp = 2}\n",
    ),
    "schedule file": (
        lambda path: asked_schedule(Namespace(name=str(path))),
        ("cli.commands.schedule:_read",),
        SCHEDULE,
    ),
    "plan file": (lambda path: parse_plan(read_text(str(path))), PLAN_READERS, PLAN),
    "object": (lambda path: read_object(str(path), "pass JSON"), (), json.dumps(CONFIG)),
}
"""Reader of a file → the function, the functions that it covers, and good contents."""


def _static() -> Any:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, foreach=False)
    return mw.to_static(network, None, nn.functional.mse_loss, optimizer)


def save_programs(place: Path) -> None:
    """Write the program of a small training step into the folder."""

    def go() -> None:
        model = _static()
        model(torch.ones(2, 4), torch.zeros(2, 2))
        model.save(place)

    os.environ[VARIABLE] = "off"
    mw.simulate(go, 1)


def load_programs(place: Path) -> Any:
    """Load a folder of programs."""
    return mw.simulate(lambda: _static().load(place, kernels=True), 1)


def find_kept(place: Path) -> Any:
    """Look up stored programs in a folder."""

    def go() -> None:
        model = _static()._builder.model
        root = place.with_name(place.name + "-kept")
        root.mkdir()
        os.environ[VARIABLE] = str(root)
        place.rename(root / _key(model))
        kept = ProgramCache()
        list(kept.captures(model))
        list(kept.find("0" * 64, model, frozenset()))
        for row in kept._read(model):
            list(kept.find(row[1].get("digest", ""), model, frozenset()))

    return mw.simulate(go, 1)


STATE: Callable[[], dict[str, Any]] = lambda: {"w": torch.ones(64, 4), "b": {"c": torch.zeros(3)}, "step": 3}  # noqa: E731
TRAINED = "trained"
QUANTIZED, NF4 = "quantized model", "nf4 model"


def _network() -> tuple[nn.Module, torch.optim.Optimizer]:
    network = nn.Linear(4, 2)
    return network, torch.optim.AdamW(network.parameters(), lr=0.1)


def save_checkpoint(name: str, place: Path) -> None:
    """Write a checkpoint in one of the forms."""
    if name == QUANTIZED:
        mw.save_quantized(mw.quantize(_plain_layers(), "int8"), place)
        return
    if name == NF4:
        write(_plain_layers(), Nf4(8, nested=True), place)
        return
    if name == TRAINED:
        network, optimizer = _network()
        network(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        mw.save_checkpoint(place, 3, network, optimizer)
        return
    state = STATE() if name != "safetensors" else {"w": torch.ones(64, 4)}
    mw.save_state_dict(state, place, format=name.split()[0]).wait()


def _load(place: Path) -> Any:
    state = STATE()
    if any(path.suffix == ".safetensors" and "rank" not in path.name for path in place.iterdir()):
        state = {"w": torch.ones(64, 4)}
    mw.load_state_dict(state, place)


def _plain_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))


def _load_quantized(place: Path) -> Any:
    mw.load_quantized(_plain_layers(), place)


def _resume(place: Path) -> Any:
    mw.load_checkpoint(place, *_network())


SHARDS = ("checkpoint.formats.safetensors_file:open_file", "checkpoint.formats.safetensors_file:digest_of")
CHECKPOINTS: tuple[tuple[str, Callable[[Path], Any], tuple[str, ...]], ...] = (
    (
        "meshwright",
        _load,
        ("checkpoint.formats.manifest:read_manifest", "checkpoint.files.json_text:parse_json", *SHARDS),
    ),
    (
        "safetensors",
        _load,
        (
            "checkpoint.formats.hub_format:read_single",
            "checkpoint.formats.hub_format:read_index",
            "checkpoint.formats.checksum_file:checksums_in",
            *SHARDS,
        ),
    ),
    (QUANTIZED, _load_quantized, ("quantize.checkpoints.load:_read",)),
    (NF4, _load_quantized, ("quantize.checkpoints.bitsandbytes_form:_state",)),
    ("dcp", _load, ("checkpoint.formats.dcp_reader:read_dcp", "checkpoint.formats.dcp_reader:_open")),
    (TRAINED, _resume, ()),
)
"""Form of a checkpoint, the function that loads it, and the functions that this covers."""
