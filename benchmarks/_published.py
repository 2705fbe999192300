"""Published training runs as models, plans and clusters, with the known behaviour of the program that ran them.

`published_runs.json` has one row per run, with its source. Facts that a row lacks follow from the program of its
source, by the table below. Nothing is chosen per row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import torch

from benchmarks._megatron_recipes import SOURCE, recipe_of
from benchmarks._published_software import (
    BRIDGE,
    COMPILED_LOSS,
    DEEPSEEK,
    DEEPSPEED,
    DEEPSPEED_ZERO,
    EAGER,
    FSDP,
    KWAI,
    MEGATRON,
    MEGATRON_2021,
    PAGEABLE,
)
from meshwright.cost import Cluster, cluster_of, device_of, link_of
from meshwright.search import (
    Experts,
    Latent,
    Plan,
    Software,
    Transformer,
    Window,
)
from meshwright.search.transformer_plans.schedule_facts import facts_of
from meshwright.search.transformer_plans.software import RepeatedPart

ROWS = Path(__file__).with_name("published_runs.json")
GIGA = 1e9
NODE = 8
DEVICE = {
    "V100-SXM-32GB": "V100", "A100-SXM-40GB": "A100-40GB", "A100-SXM-80GB": "A100", "A800-SXM-80GB": "A800",
    "H100-SXM-80GB": "H100", "H100-96GB-HBM2e-500W": "H100-HBM2e", "H800-SXM-80GB": "H800", "H200-SXM-141GB": "H200",
    "B200-SXM-180GB": "B200", "B300-SXM-288GB": "B300", "GB200-NVL72": "GB200", "GB300-NVL72": "GB300",
    "MI300X-192GB": "MI300X", "MI325X-256GB": "MI325X", "Ascend-910B-64GB": "Ascend-910B",
}  # fmt: skip
"""Device in the rows → our name."""
SHORT = (
    "A100-PCIe",
    "A100",
    "A800",
    "H100",
    "H800",
    "H200",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "V100",
    "MI300X",
    "MI325X",
    "Ascend-910B",
)
"""Prefixes of the device names in rows that are spelled differently."""
PROGRAM: Mapping[str, Software] = {
    "bigscience-workshop/bigscience": DEEPSPEED,
    "2201.11990": DEEPSPEED,
    "deepspeedai/DeepSpeed": DEEPSPEED_ZERO,
    SOURCE: BRIDGE,
    "2412.19437": DEEPSEEK,
    # its recipes of February 2023 have `overlap_grad_sync: False`
    "NVIDIA/NeMo-Framework-Launcher": replace(MEGATRON, fused_attention=False, tensor=1.0, exposed=1.0),
    "kwai/Megatron-Kwai": KWAI,
    # a kernel with a bias for distances, and a fused loss whose gradient replaces the logits
    "mosaicml/llm-foundry": replace(FSDP, attention=0.7, logit=2.0),
}
"""Source → its program, if that does not follow from precision and stage of ZeRO."""
DIVIDES_SEQUENCES = frozenset({SOURCE, "NVIDIA/NeMo"})
"""Sources whose recipes always shard sequences under tensor parallelism, although their tables do not say so."""
TITAN = "pytorch/torchtitan"
COMPILED = frozenset({"NVIDIA/JAX-Toolbox", TITAN})
SCHEDULE = {
    None: "1F1B", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved 1F1B", "zb-1p": "ZB-1p", "zb-2p": "ZB-2p",
    "1f1b-variant": "1F1B", "gpipe": "GPipe", "zb-h1": "ZB-H1", "zb-v": "ZB-V", "v-half": "V-Half", "v-min": "V-Min",
    "dualpipe": "DualPipe-V",
}  # fmt: skip
"""Schedule in the rows → our name. DualPipe in its form of a V has the same bubble, and half of the parameters."""


@dataclass(frozen=True)
class Run:
    """A row as arguments of the prediction; `seconds` is the measured time of a step."""

    name: str
    source: str
    group: str
    """Runs of the same source that differ in their plan only."""
    model: Transformer
    plan: Plan
    cluster: Cluster
    software: Software
    seconds: float | None
    memory: float | None
    is_noisy: bool
    is_complete: bool
    row: Mapping[str, Any]


def runs(path: Path = ROWS) -> list[Run]:
    """Return all measured rows of training from scratch."""
    rows = json.loads(path.read_text())["rows"]
    return [run_of(row) for row in rows if is_usable(row)]


def is_usable(row: Mapping[str, Any]) -> bool:
    """True if a row is a measured training from scratch, and gives all parts of its plan that have no default."""
    p, t = row["parallel"], row["train"]
    known = all((p["tp"], p["pp"], p["cp"], p["dp"], t["global_batch"], t["seq"]))
    return row["truth"] == "measured" and t["task"] == "pretrain" and known


def run_of(row: Mapping[str, Any]) -> Run:
    """Return one row as a run."""
    source = source_of(row)
    model, plan = replace(model_of(row["model"]), ahead=tokens_ahead(row)), plan_of(row)
    hardware, train = row["hardware"], row["train"]
    same = (model, hardware["gpu"], hardware["n_gpus"], plan.batch, plan.sequence, train["precision"], source)
    cluster = cluster_for(hardware)
    return Run(
        row["id"],
        source,
        repr(same),
        model,
        plan,
        cluster,
        software_of(row, source, plan),
        seconds_of(row),
        memory_of(row["measured"]),
        row["noisy"],
        not row["missing"],
        row,
    )


BIASED = frozenset({"GPT-OSS-120B", "GPT-OSS-20B"})
"""Models whose experts have biases."""
NODES = {"DeepSeek-V3": 4}
"""Model → number of nodes that the experts of a token are on at most (arXiv 2412.19437)."""


def source_of(row: Mapping[str, Any]) -> str:
    return row["source"].get("repo") or row["source"].get("arxiv") or "?"


def model_of(m: Mapping[str, Any]) -> Transformer:
    experts = latent = window = None
    if m["kind"] == "moe":
        shared, dense = m.get("shared_expert_ffn") or 0, m.get("dense_layers") or 0
        biased, nodes = m["name"] in BIASED, NODES.get(m["name"])
        experts = Experts(m["experts"], m["top_k"], m["moe_ffn"], shared, dense, biased=biased, nodes=nodes)
    if m.get("attention") == "mla":
        latent = Latent(m.get("q_lora") or 0, m["kv_lora"], m["qk_nope"], m["qk_rope"], m["v_head"])
    if m.get("sliding_window"):
        window = Window(m["sliding_window"], m.get("sliding_every") or 1)
    sizes = {k: m[k] for k in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    gated, tied = m["gated_mlp"], m["tied_embeddings"]
    return Transformer(**sizes, gated=gated, tied=tied, experts=experts, latent=latent, window=window)


INTERLEAVES, LAYERS_OF_CHUNKS = "mlcommons/", 2
"""Beginning of the names of sources that run Interleaved 1F1B if a row does not say so, and the layers of a chunk."""
AHEAD = {(SOURCE, "DeepSeek-V3"): 1, ("2412.19437", "DeepSeek-V3"): 1}
"""Source and model → tokens that are predicted ahead, which the rows do not say."""


def tokens_ahead(row: Mapping[str, Any]) -> int:
    """Return the number of tokens that are predicted besides the next one."""
    without = "w/o MTP" in (row.get("note") or "")
    return 0 if without else AHEAD.get((source_of(row), row["model"]["name"]), 0)


RECOMPUTED = {"NVIDIA/NeMo-Framework-Launcher": "selective"}
"""Source → what its program recomputed, if the rows say something else.

The rows have the recipes of October 2023. The table of results is the same in the release of February 2023 (commit
f64354a5), whose recipes of both models have `activations_checkpoint_granularity: selective`, with scores in memory.
"""


def plan_of(row: Mapping[str, Any]) -> Plan:
    p, t, layers = row["parallel"], row["train"], row["model"]["layers"]
    schedule, unknown = SCHEDULE.get(p["schedule"], "1F1B"), "schedule/vpp" in row["missing"]
    if unknown and p["pp"] > 1 and source_of(row).startswith(INTERLEAVES):
        schedule = "Interleaved 1F1B"
    usual = layers // (p["pp"] * LAYERS_OF_CHUNKS) if unknown else -(-layers // p["pp"])
    chunks = facts_of(schedule).chunks or p["vpp"] or usual
    divided, recompute = p["sequence_parallel"], t["recompute"] or "none"
    if divided is None:
        divided = p["tp"] > 1 and source_of(row) in DIVIDES_SEQUENCES
    if t["recompute"] is None and source_of(row) == SOURCE and recipe_of(row).recomputes:
        recompute = "selective"
    recompute = RECOMPUTED.get(source_of(row), recompute)
    kind = "full" if recompute == "full" else "none" if recompute == "none" else "selective"
    return Plan(
        p["dp"],
        p["tp"],
        p["pp"],
        p["cp"],
        p.get("ep") or 1,
        chunks,
        p["zero_stage"] or 0,
        bool(divided),
        schedule,
        t["micro_batch"] or 1,
        t["global_batch"],
        t["seq"],
        kind,
        t["precision"],
    )


def cluster_for(hardware: Mapping[str, Any]) -> Cluster:
    """Return the device's usual cluster, with the row's nodes and network."""
    usual = usual_cluster(hardware)
    together = max(hardware["gpus_per_node"], usual.per_node if usual.per_node > NODE else 0)
    gigabits = hardware.get("inter_node_gbps_per_gpu") or 400
    outside = replace(link_of("InfiniBand-HDR"), bandwidth=gigabits / 8 * GIGA)
    return replace(usual, per_node=together, outside=outside, devices=hardware["n_gpus"])


def usual_cluster(hardware: Mapping[str, Any]) -> Cluster:
    """Return the usual cluster of the row's device; an unknown device is a scaled known one with the nearest peak."""
    name = hardware["gpu"]
    known = DEVICE.get(name) or next((ours for ours in SHORT if name.lower().startswith(ours.lower())), None)
    if known is not None:
        return cluster_of(known)
    peak = hardware["peak_tflops_bf16"] * 1e12
    near = min(set(DEVICE.values()), key=lambda ours: abs(log(device_of(ours).peak(torch.bfloat16) / peak)))
    usual = cluster_of(near)
    more = peak / usual.device.peak(torch.bfloat16)
    flops = {dtype: rate * more for dtype, rate in usual.device.flops.items()}
    memory = (hardware.get("mem_gb") or 80) * GIGA
    return replace(usual, device=replace(usual.device, name=name, flops=flops, memory=memory))


ROME = 2 * 8 * 25.6 * GIGA
"""Bytes per second of the memory of a node with two EPYC 7V12, from the source: eight DDR4-3200 channels each."""
ELEMENTWISE: frozenset[RepeatedPart] = frozenset({"activation", "norms"})
REPEATED = {"kwai-partial(mlp act+norm)": ELEMENTWISE, "minimal_flash": ELEMENTWISE}
"""A source's name for its selection of recomputed values → the parts of a layer that are recomputed.

The first is `--kaimm-recompute-mlp-activation-func --kaimm-recompute-norm` of Megatron-Kwai. The second is a policy of
MaxText, which keeps the results of all products and of attention.
"""
ROWWISE = 4.0
"""Cost of a scale per row relative to a scale per tensor."""


def software_of(row: Mapping[str, Any], source: str, plan: Plan) -> Software:
    """Return the behaviour of the program, by its source and by the notes of the row."""
    base, train = program_of(source, plan), row["train"]
    if source == SOURCE:
        base = recipe_of(row).applied(base, row["model"]["layers"])
    if "overlap off" in (row.get("note") or ""):
        base = replace(base, exposed=1.0, tensor=1.0, messages=1.0)
    if plan.zero == 0:
        base = replace(base, exposed=1.0)
    base = _as_compiled(base, row, source, plan)
    if train.get("fsdp_mixed_precision") == "PURE":
        base = replace(base, reduced=2.0)
    if "rowwise" in str(train.get("fp8_recipe")):
        base = replace(base, casts=base.casts * ROWWISE, casts_first=False)
    if train.get("offload"):
        base = replace(base, stowed=PAGEABLE, hosted=ROME)
    base = replace(base, offloaded=train.get("activation_offload_ratio") or base.offloaded)
    if train["recompute"] in REPEATED:
        base = replace(base, selective=None, repeated=REPEATED[train["recompute"]])
    return replace(base, tensor=0.5) if train.get("async_tp") else base


def _as_compiled(base: Software, row: Mapping[str, Any], source: str, plan: Plan) -> Software:
    """Return the program with what the row says about its compilation."""
    compiles = row["train"].get("compile")
    if compiles and source == TITAN and _year_of_page(row) >= 2025:
        base = replace(base, **COMPILED_LOSS)
    if plan.zero == 3 and not (source in COMPILED if compiles is None else compiles):
        base = replace(base, streams=EAGER)
    return replace(base, compiled=bool(compiles))


def _year_of_page(row: Mapping[str, Any]) -> int:
    """Return the year in the name of the page of a row, as in `llama3_h100_202412_torchtitan.md`; 0 if it has none."""
    found = re.search(r"_(20\d\d)-?\d\d[_.]", row["source"].get("path") or "")
    return int(found[1]) if found else 0


def program_of(source: str, plan: Plan) -> Software:
    """Return the program of a source; half precision with loss scaling indicates one from before fused attention."""
    if source in PROGRAM:
        return PROGRAM[source]
    if plan.zero == 3:
        return FSDP
    return MEGATRON_2021 if plan.precision == "fp16" else MEGATRON


def seconds_of(row: Mapping[str, Any]) -> float | None:
    """Return seconds of a step; derived from operations per second only if the formula is known (arXiv 2104.04473)."""
    known = row["measured"].get("step_time_s") or row["derived"].get("step_time_s")
    m, t, devices = row["model"], row["train"], row["hardware"]["n_gpus"]
    if known or not str(t.get("tflops_convention", "")).startswith("hardware(4x"):
        return known
    h, s = m["hidden"], t["seq"]
    work = 96 * t["global_batch"] * s * m["layers"] * h * h * (1 + s / (6 * h) + m["vocab"] / (16 * m["layers"] * h))
    return work / (row["measured"]["tflops_per_gpu"] * 1e12 * devices)


def memory_of(measured: Mapping[str, Any]) -> float | None:
    """Return bytes; the rows' kind says whether their numbers are GB or GiB."""
    amount, kind = measured.get("memory_gib"), measured.get("memory_kind") or ""
    return None if amount is None else amount * (GIGA if "GB" in kind else 2**30)
