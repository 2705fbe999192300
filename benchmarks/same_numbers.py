"""Bits of logits and of trained parameters inside `same_numbers`, on many meshes, and what the block costs.

Four families from transformers with random weights. The reference is a plain model on one device, which reads all
tokens in one pass. Compared with it are whole passes and decode steps with a cache, on simulated ranks and in batches
of 1 to 16. Trained parameters are compared after steps of AdamW with clipping and dropout: in eager and static mode, in
stages, with checkpointed layers, and with a change of mesh in the middle. Steps in several microbatches are without
dropout, whose masks are drawn for each microbatch. The value is the number of token positions and of parameters with a
different bit, and the goal is 0. "control" counts parameters outside the block. Costs are ratios of seconds on one
device.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._generate_layouts import GenerationLayout
from benchmarks.overhead import in_turns

VOCABULARY, BATCH, LENGTH, PROMPT, STEPS = 96, 16, 40, 24, 20
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
LARGE = SIZES | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
"""Sizes of the model whose seconds are measured."""
FAMILIES = ("Llama", "Qwen3", "GPT-2", "GPT-NeoX")
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (slice(0, 1), slice(5, 8), slice(0, 16))
"""Rows of the batches of one device."""
PASSES = {
    "dp 2": GenerationLayout({"dp": 2}),
    "dp 2 × tp 2": GenerationLayout({"dp": 2, "tp": 2}, weights=True),
    "ZeRO-3": GenerationLayout({"dp": 2}, zero=3),
    "pp 2": GenerationLayout({"pp": 2}),
}
DECODES = {f"tp {n}": GenerationLayout({"tp": n}, weights=True) for n in (2, 4, 8)}
ONE_DEVICE = GenerationLayout({})
LAYOUTS = {
    "dp 2": PASSES["dp 2"],
    "dp 4": GenerationLayout({"dp": 4}),
    "tp 2": DECODES["tp 2"],
    "tp 4": DECODES["tp 4"],
    "dp 2 × tp 2": PASSES["dp 2 × tp 2"],
    "pp 2": PASSES["pp 2"],
}
ZERO_OPTIONS = {"sharding": {"enable": True, "stage": 3, "axes": ["dp"], "least": 16}}
IDS = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator(device="cpu").manual_seed(1))
NOT_COVERED = (
    "Inductor, left padding, processes, accelerators, microbatches of sharded rows, tied weights in microbatches"
)


@dataclass(frozen=True)
class Training:
    """A way to train: a layout, options of `to_static` or None, microbatches, and a layout for the second half."""

    layout: GenerationLayout = ONE_DEVICE
    options: Mapping[str, Any] | None = None
    microbatches: int = 0
    then: GenerationLayout | None = None
    checkpointed: bool = False
    drop: float = 0.1

    @property
    def ranks(self) -> int:
        return max(self.layout.ranks, 1 if self.then is None else self.then.ranks)


def _piped(microbatches: int, schedule: str) -> dict[str, Any]:
    return {"pipeline": {"enable": True, "accumulate_steps": microbatches, "schedule_mode": schedule}}


TRAININGS: dict[str, Training] = {
    **{name: Training(layout) for name, layout in LAYOUTS.items()},
    "ZeRO-3": Training(PASSES["ZeRO-3"]),
    "one device, static": Training(options={}),
    **{f"{name}, static": Training(layout, {}) for name, layout in LAYOUTS.items() if "pp" not in name},
    "ZeRO-3, static": Training(LAYOUTS["dp 2"], ZERO_OPTIONS),
    "pp 2, static": Training(LAYOUTS["pp 2"], _piped(1, "1F1B")),
    "pp 2, 4 microbatches": Training(LAYOUTS["pp 2"], microbatches=4, drop=0.0),
    "pp 2, static, 8 microbatches": Training(LAYOUTS["pp 2"], _piped(8, "ZB-H1"), drop=0.0),
    "dp 2 × tp 2, then ZeRO-3": Training(LAYOUTS["dp 2 × tp 2"], then=PASSES["ZeRO-3"]),
    "tp 4, then dp 2, static": Training(LAYOUTS["tp 4"], {}, then=LAYOUTS["dp 2"]),
    "dp 2 × tp 2, checkpointed": Training(LAYOUTS["dp 2 × tp 2"], checkpointed=True),
}
FEW = ("dp 2 × tp 2", "tp 2, static", "pp 2, 4 microbatches", "dp 2 × tp 2, then ZeRO-3", "dp 2 × tp 2, checkpointed")
"""The trainings of the quick version."""


def make(family: str, dtype: torch.dtype, drop: float = 0.0, sizes: dict[str, Any] = SIZES) -> nn.Module:
    """Return a model with random weights, whose logits are far from uniform."""
    t: Any = import_module("transformers")
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 4, "attention_dropout": drop}
    models: dict[str, Callable[[], Any]] = {
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, **heads)),
        "Qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, **heads, head_dim=16, tie_word_embeddings=True)),
        "GPT-NeoX": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes, hidden_dropout=drop)),
        "GPT-2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=8, resid_pdrop=drop, attn_pdrop=drop)
        ),
    }
    model = models[family]().to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    return model


def whole_pass(model: Any, ids: Tensor = IDS, block: Callable[[], Any] = mw.same_numbers) -> Tensor:
    """Return the logits of all tokens, from one pass."""
    with torch.no_grad(), block():
        logits = model(input_ids=ids).logits
    return _whole(logits)


def decoded(model: Any, ids: Tensor = IDS, block: Callable[[], Any] = mw.same_numbers) -> Tensor:
    """Return the logits of all tokens, from a pass over the prompt and a step with a cache for each further token."""
    with torch.no_grad(), block():
        out = model(input_ids=ids[:, :PROMPT], use_cache=True)
        found = [out.logits]
        for at in range(PROMPT, ids.shape[1]):
            out = model(input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
    return torch.cat([_whole(x) for x in found], 1)


def _whole(x: Tensor) -> Tensor:
    return (mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x).detach().clone()


class WithLoss(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def clip(model: nn.Module) -> None:
    mw.clip_grad_norm_(model.parameters(), 0.5)


class Run:
    """A model in training."""

    def __init__(self, way: Training, family: str, layout: GenerationLayout, sizes: dict[str, Any] = SIZES) -> None:
        self.way, self.layout = way, layout
        self.model: Any = make(family, torch.float32, way.drop, sizes).train()
        if way.checkpointed:
            self.model.gradient_checkpointing_enable()
        self.optimizer = adamw(self.model)
        if layout.axes:
            layout.with_optimizer(self.model, self.optimizer)
        self.step = self._step_of(WithLoss(self.model))

    def _step_of(self, model: nn.Module) -> Callable[[Tensor], Any]:
        if self.way.microbatches:
            return mw.microbatched(model, None, self.layout.mesh(), self.way.microbatches)
        if self.way.options is None:
            return lambda ids: model(ids).backward()
        self.optimizer.register_step_pre_hook(lambda *_: clip(model))
        return mw.to_static(model, None, None, self.optimizer, mw.Strategy.of(**self.way.options))

    def train(self, steps: range, block: Callable[[], Any] = mw.same_numbers) -> dict[str, Tensor]:
        """Return the parameters after these steps."""
        for step in steps:
            torch.manual_seed(step)
            with block():
                self.step((IDS[:8] + 7 * step) % VOCABULARY)
                if self.way.options is None:
                    clip(self.model)
                    self.optimizer.step()
            self.optimizer.zero_grad()
        return {name: _whole(p) for name, p in self.model.named_parameters()}


def trained_on(way: Training, family: str, steps: int, block: Callable[[], Any]) -> list[dict[str, Tensor]]:
    """Return the parameters of each rank after training."""
    if way.then is None:
        return mw.simulate(lambda: Run(way, family, way.layout).train(range(steps), block), way.ranks)
    with TemporaryDirectory() as folder:
        half, path, then = steps // 2, Path(folder) / "half", way.then

        def begin() -> None:
            run = Run(way, family, way.layout)
            run.train(range(half), block)
            mw.save_checkpoint(path, half, run.model, run.optimizer)

        def go_on() -> dict[str, Tensor]:
            run = Run(way, family, then)
            mw.load_checkpoint(path, run.model, run.optimizer)
            return run.train(range(half, steps), block)

        mw.simulate(begin, way.layout.ranks)
        return mw.simulate(go_on, then.ranks)


@dataclass
class Count:
    """Numbers of compared and of different token positions or parameters, by the way of computing them."""

    compared: dict[str, int] = field(default_factory=dict[str, int])
    different: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, way: str, flags: list[bool]) -> None:
        self.compared[way] = self.compared.get(way, 0) + len(flags)
        self.different[way] = self.different.get(way, 0) + sum(flags)

    @property
    def total(self) -> int:
        return sum(self.different.values())


def positions(found: Tensor, wanted: Tensor) -> list[bool]:
    """Return one flag for each token position: True if a bit of its logits differs."""
    return (found != wanted).any(-1).flatten().tolist()


def _parameters(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[bool]:
    return [not torch.equal(found[name], p) for name, p in wanted.items()]


def compare_logits(
    count: Count, family: str, dtype: torch.dtype, layouts: dict[str, Any], steps: dict[str, Any]
) -> None:
    """Compare whole passes on `layouts`, and decode steps on `steps` and on one device, with a pass on one device."""
    model = make(family, dtype)
    wanted = whole_pass(model)
    for rows in ROWS:
        count.add("one device, pass", positions(whole_pass(model, IDS[rows]), wanted[rows]))
        count.add("one device, decode", positions(decoded(model, IDS[rows]), wanted[rows]))
    for way, chosen, call in (("pass", layouts, whole_pass), ("decode", steps, decoded)):
        for name, layout in chosen.items():
            for found in mw.simulate(lambda: call(layout.put_on(make(family, dtype))), layout.ranks):  # noqa: B023
                count.add(f"{name}, {way}", positions(found, wanted))


def compare_training(
    count: Count, family: str, ways: Mapping[str, Training], steps: int, block: Callable[[], Any]
) -> None:
    """Compare parameters after training in these ways with those of one device in eager mode."""
    drops = {way.drop for way in ways.values()}
    wanted = {drop: trained_on(Training(drop=drop), family, steps, block)[0] for drop in drops}
    for name, way in ways.items():
        for found in trained_on(way, family, steps, block):
            count.add(name, _parameters(found, wanted[way.drop]))


def costs(turns: int) -> dict[str, float]:
    """Return seconds inside the block divided by those outside, on one device, for decoding and a training step."""
    model = make("Llama", torch.float32, sizes=LARGE)
    run = Run(Training(drop=0.0), "Llama", ONE_DEVICE, LARGE)
    calls: dict[str, Callable[[], Any]] = {
        "decode": lambda: decoded(model, block=nullcontext),
        "decode, same": lambda: decoded(model),
        "training": lambda: run.train(range(1), nullcontext),
        "training, same": lambda: run.train(range(1)),
    }
    seconds = {name: statistics.median(times) for name, times in in_turns(calls, turns, 1).items()}
    return {name: round(seconds[f"{name}, same"] / seconds[name], 2) for name in ("decode", "training")}


def _covered(ways: Mapping[str, Training], family: str) -> dict[str, Training]:
    """Return the ways without several microbatches for a family that ties weights."""
    return {name: way for name, way in ways.items() if way.drop or family != "Qwen3"}


def _cells(quick: bool) -> Iterator[tuple[str, torch.dtype]]:
    yield from product(FAMILIES[:1] if quick else FAMILIES, DTYPES[:1] if quick else DTYPES)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: different token positions and parameters."""
    logits, parameters, control = Count(), Count(), Count()
    steps = 2 if quick else STEPS
    few = {"dp 2 × tp 2": PASSES["dp 2 × tp 2"]}
    ways = {name: TRAININGS[name] for name in FEW} if quick else TRAININGS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family, dtype in _cells(quick):
            compare_logits(logits, family, dtype, few if quick else PASSES, {} if quick else DECODES)
        for family in FAMILIES[: 1 if quick else 2]:
            compare_training(parameters, family, _covered(ways, family), steps, mw.same_numbers)
        compare_training(control, "Llama", {"dp 2 × tp 2": TRAININGS["dp 2 × tp 2"]}, 2, nullcontext)
        ratios = costs(3 if quick else 7)
    wrong = logits.total + parameters.total
    return {
        "name": "same_numbers",
        "value": wrong,
        "goal": 0,
        "ok": not wrong and control.total > 0,
        "details": {
            "tokens": logits.compared,
            "different_tokens": logits.different,
            "parameters": parameters.compared,
            "different_parameters": parameters.different,
            "control": control.different,
            "training_steps": steps,
            "cost": ratios,
            "cost_goal": 1.5,
            "not_covered": NOT_COVERED,
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
