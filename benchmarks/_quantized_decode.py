"""The time of a token of the sampler with quantized weights, beside that with weights in bfloat16.

One prompt, greedy, a Llama of transformers with 4 layers, on one device and one thread. The time is that of the
processor.
"""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import torch

import meshwright as mw

SCHEMES = ("int8", "w4a16", "int8-dynamic", "nf4")
TOKENS, ROUNDS = 24, 4
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


def decode_ratios(hidden: int) -> dict[str, float]:
    """Return the seconds of a token for each scheme over those in bfloat16, from the fastest of some rounds."""
    torch.set_num_threads(1)
    samplers = {name: mw.sampler(model) for name, model in _models(hidden).items()}
    seconds = dict.fromkeys(samplers, float("inf"))
    for _ in range(ROUNDS):
        for name, sampler in samplers.items():
            seconds[name] = min(seconds[name], (_seconds(sampler, 2 + TOKENS) - _seconds(sampler, 2)) / TOKENS)
    return {name: round(each / seconds["bfloat16"], 3) for name, each in seconds.items() if name != "bfloat16"}


def _models(hidden: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, int] = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "vocab_size": 1000}
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, **sizes)
    exact = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    return {"bfloat16": exact} | {name: mw.quantize(deepcopy(exact), name) for name in SCHEMES}


def _seconds(sampler: Any, tokens: int) -> float:
    start = time.process_time()
    sampler.generate(PROMPT, max_new_tokens=tokens)
    return time.process_time() - start
