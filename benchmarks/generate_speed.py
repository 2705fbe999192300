"""Seconds of generation on two processes over Gloo, beside `generate()` of transformers with `tp_plan="auto"`.

A Llama with 6 layers of width 512 in float32, sharded with tensor parallelism. All contenders run in the same
processes with one thread each, start with the same weights, and take turns. A ratio is the median, over the turns, of
the ratio of two times of one turn. The cases:

call      batch 8, prompts of 32 tokens, 32 new tokens; also the collectives of a token
long      a token behind 2,040 others: a program beside an eager step that writes its cache in place
mixed     prompts of 4 to 32 tokens that end after 1 to 128 tokens, 32 rows at a time: tokens per second with slots that
          are filled again, divided by those of padded batches of 32, one after the other
programs  seconds of recording, in new processes and in processes that find the program of earlier ones
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks._transports import environment
from benchmarks.static_speed import python_path
from meshwright.comm import current_communicator, launch

GOALS = {"static / HF": 0.6, "eager / HF": 1.0, "collectives": 12, "long": 1.0, "programs": 20.0, "restart": 2.0}
LEAST_MIXED = 2.0
LAYERS, WORDS, RANKS = 6, 4096, 2
BATCH, PROMPT, NEW, LONG = 8, 32, 32, 2040
TURNS, QUICK_TURNS, MIXED_TURNS = 5, 2, 1
MIXED, QUICK_MIXED, ROWS, MOST = 192, 64, 32, 128
STOP = range(0, WORDS, 32)
"""Tokens that end a row, after 32 tokens on average."""
STYLES = {
    **{f"*.{name}_proj": mw.ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj": mw.RowwiseParallel() for name in ("o", "down")},
}
Call = Callable[[], Any]


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1376, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, WORDS, (count, length), generator=generator).tolist()


# --- one of the processes ----------------------------------------------------------------------------------------


def main(path: str, weights: str, turns: str, what: str) -> None:
    """Run one rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mw.init_process(backend="gloo")
    model = llama()
    mw.parallelize(model, None, mw.ProcessMesh(list(range(RANKS)), ["tp"]), mw.Parallelism(STYLES))
    static, eager = mw.sampler(model, static_after=0), mw.sampler(model, static_after=None)
    found: dict[str, Any] = {"programs": recording(static)}
    if what == "all":
        found["call"] = of_call(static, eager, weights, int(turns))
        found["long"] = of_long(static, eager, int(turns))
        found["mixed"] = of_mixed(static, int(turns))
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    torch.distributed.barrier()


def recording(static: mw.Sampler) -> dict[str, float]:
    """Return the seconds of a first short call, which makes the program, beyond those of the second one."""
    first, second = (timed(lambda: static.generate(prompts(BATCH, PROMPT), 2, temperature=0)) for _ in range(2))
    return {"seconds": first - second}


def of_call(static: mw.Sampler, eager: mw.Sampler, weights: str, turns: int) -> dict[str, Any]:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(weights, tp_plan="auto", dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor(prompts(BATCH, PROMPT))

    def by_transformers() -> torch.Tensor:
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        return found[:, PROMPT:]

    calls: dict[str, Call] = {
        "static": lambda: static.generate(ids, NEW, temperature=0).tokens,
        "eager": lambda: eager.generate(ids, NEW, temperature=0).tokens,
        "HF": by_transformers,
    }
    tokens = {name: call() for name, call in calls.items()}
    collectives = {name: calls_of_a_token(sampler, ids) for name, sampler in (("static", static), ("eager", eager))}
    equal = {name: torch.equal(found, tokens["HF"]) for name, found in tokens.items()}
    return {**compared(calls, "HF", turns), "tokens equal to HF": equal, "collectives of a token": collectives}


def of_long(static: mw.Sampler, eager: mw.Sampler, turns: int) -> dict[str, Any]:
    """Return the seconds of a token behind many: the difference of the medians of two lengths.

    There is no ratio if the noise of the machine is larger than a difference.
    """
    ids, lengths = torch.tensor(prompts(BATCH, LONG - 16)), (2, 18)
    samplers, seconds = {"static": static, "eager": eager}, dict[str, float]()
    for sampler in samplers.values():
        sampler.generate(ids, lengths[1], temperature=0)  # makes the program
    times: dict[tuple[str, int], list[float]] = {(name, new): [] for name in samplers for new in lengths}
    for _ in range(turns):
        for name, new in times:
            times[name, new].append(timed(lambda name=name, new=new: samplers[name].generate(ids, new, temperature=0)))
    for name in samplers:
        few, many = (statistics.median(times[name, new]) for new in lengths)
        seconds[name] = (many - few) / (lengths[1] - lengths[0])
    is_measured = min(seconds.values()) > 0
    ratio = round(seconds["static"] / seconds["eager"], 3) if is_measured else float("inf")
    return {"seconds": seconds, "ratios": {"static": ratio}}


def of_mixed(static: mw.Sampler, turns: int) -> dict[str, Any]:
    """Return the tokens per second of rows of mixed lengths in slots and in padded batches, and their ratio."""
    count = QUICK_MIXED if turns == QUICK_TURNS else MIXED
    given = [prompt[: 4 + 29 * at // count] for at, prompt in enumerate(prompts(count, PROMPT))]
    given = [given[at] for at in torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()]
    made = {"slots": 0, "padded": 0}

    def slots() -> None:
        made["slots"] = int(static.generate(given, MOST, stop=STOP, batch_size=ROWS).lengths.sum())

    def padded() -> None:
        batches = (given[at : at + ROWS] for at in range(0, count, ROWS))
        made["padded"] = sum(int(static.generate(batch, MOST, stop=STOP).lengths.sum()) for batch in batches)

    static.generate(given[:ROWS], MOST, temperature=0)  # makes the program
    calls: dict[str, Call] = {"padded": padded, "slots": slots}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(min(turns, MIXED_TURNS)):
        for name, call in calls.items():
            times[name].append(timed(call))
    rates = {name: round(made[name] / statistics.median(found), 1) for name, found in times.items()}
    return {"tokens": made, "tokens a second": rates, "ratio": round(rates["slots"] / rates["padded"], 3)}


def calls_of_a_token(sampler: mw.Sampler, ids: torch.Tensor) -> float:
    seen, counts = current_communicator().seen, []
    for new in (NEW // 2, NEW):
        before = seen.total_calls
        sampler.generate(ids, new, temperature=0)
        counts.append(seen.total_calls - before)
    return (counts[1] - counts[0]) / (NEW - NEW // 2)


def compared(calls: dict[str, Call], base: str, turns: int) -> dict[str, Any]:
    """Return the seconds of calls that take turns, and their ratios to those of `base`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(timed(call))
    return rows(times, base)


def rows(times: dict[str, list[float]], base: str) -> dict[str, Any]:
    return {
        "seconds": {name: round(statistics.median(found), 4) for name, found in times.items()},
        "ratios": {
            name: round(statistics.median(a / b for a, b in zip(found, times[base], strict=True)), 3)
            for name, found in times.items()
            if name != base
        },
    }


def timed(call: Call) -> float:
    """Return the seconds of a call on the slowest rank."""
    torch.distributed.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begin)
    torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    return float(seconds)


# --- the figure --------------------------------------------------------------------------------------------------


def measure(turns: int) -> dict[str, Any]:
    """Return the results of new processes, and of processes that find the programs of these."""
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights"
        llama().save_pretrained(weights)
        env = {"PYTHONPATH": python_path(), **environment(gloo=True), "MESHWRIGHT_PROGRAMS": f"{folder}/programs"}
        found: list[dict[str, Any]] = []
        for what in ("all", "restart"):
            path = Path(folder) / f"{what}.json"
            argv = ["-m", "benchmarks.generate_speed", str(path), weights, str(turns), what]
            status = launch(argv, RANKS, {**os.environ, **env}, timeout=1800)
            if status:
                return {"failed": f"the processes ended with status {status}"}
            found.append(json.loads(path.read_text()))
    return {**found[0], "restart": found[1]["programs"]}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: ratios of seconds, collectives of a token, and seconds of recording."""
    found = measure(QUICK_TURNS if quick else TURNS)
    value = {} if "failed" in found else values(found)
    return {
        "name": "generate_speed",
        "value": value,
        "goal": f"at most {GOALS}; mixed at least {LEAST_MIXED}",
        "ok": bool(value) and is_reached(value),
        "details": {"unit": "seconds, one thread a process, two processes over Gloo", **found},
    }


def is_reached(value: dict[str, float]) -> bool:
    return value["mixed"] >= LEAST_MIXED and all(value[name] <= goal for name, goal in GOALS.items())


def values(found: dict[str, Any]) -> dict[str, float]:
    call = found["call"]
    return {
        "static / HF": call["ratios"]["static"],
        "eager / HF": call["ratios"]["eager"],
        "collectives": call["collectives of a token"]["static"],
        "long": found["long"]["ratios"]["static"],
        "mixed": found["mixed"]["ratio"],
        "programs": round(found["programs"]["seconds"], 2),
        "restart": round(found["restart"]["seconds"], 2),
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        print(json.dumps(run()))
