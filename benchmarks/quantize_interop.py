"""Logits of quantized models that transformers loads from our files, and that we load from those of other libraries.

transformers reads what `mw.save_quantized` writes, by the package compressed-tensors, and computes logits. It writes
the model too, and `mw.load_quantized` reads these files. Files in the forms of GPTQ, AWQ and bitsandbytes are written
here as these forms are published; their logits are those of a model with the numbers that the files stand for. If
llm-compressor is installed (see `_llm_compressor`), transformers and Meshwright load the files that it writes.
The value is the largest difference of logits.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import meshwright as mw
from benchmarks._llm_compressor import ABSENT, quantized_by_rival
from benchmarks._quantized_forms import FORMS, Awq, Gptq, Nf4, write
from meshwright.quantize import NumberFormat, Scheme

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
MODELS = ("Llama", "Qwen2", "Mistral")
SCHEMES = {
    "int8": Scheme.preset("int8"),
    "w4a16": Scheme.preset("w4a16", group_size=32),
    "w4a16-gptq": Scheme.preset("w4a16-gptq", group_size=32),
    "w4a16-awq": Scheme.preset("w4a16-awq", group_size=32),
    "int3": Scheme(NumberFormat(3, strategy="group", group_size=32)),
    "fp8": Scheme.preset("fp8"),
    "fp8-dynamic": Scheme.preset("fp8-dynamic"),
    "mxfp4": Scheme.preset("mxfp4"),
    "nvfp4": Scheme.preset("nvfp4"),
}
"""Schemes whose products transformers computes as we do; it multiplies the codes of `int8-dynamic` as floats."""
IDS = torch.arange(16, device="cpu").view(2, 8)


def make(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def differences(name: str, scheme: Scheme, folder: Path) -> tuple[float, float]:
    """Return the largest differences of their logits for our files, and of our logits for their files."""
    dtype = torch.bfloat16 if scheme.weights.is_float4 else torch.float32  # the other one unpacks float4 to bfloat16
    model = mw.quantize(make(name, dtype), scheme, [{"input_ids": IDS}])
    wanted = logits(model)
    mw.save_quantized(model, folder / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", dtype=dtype)
    theirs.save_pretrained(folder / "theirs")  # its first call unpacks the weights for good
    read = largest(wanted, logits(theirs))
    again = mw.load_quantized(make(name, dtype), folder / "theirs")
    return read, largest(wanted, logits(again))


def differences_of_form(name: str, form: Gptq | Awq | Nf4, folder: Path) -> tuple[float, float]:
    """Return the largest differences of logits for a file in another form: on one device, and saved again by us.

    The second one is that of transformers, 0 for numbers that it does not load: nf4, packed zero points, and groups
    that are not neighbours, which compressed-tensors 0.20 refuses.
    """
    exact = write(make(name, torch.float32), form, folder / "theirs", without=("lm_head",))
    model = mw.load_quantized(make(name, torch.float32), folder / "theirs")
    read = largest(logits(exact), logits(model))
    if not isinstance(form, Gptq) or not form.symmetric or form.act_order:
        return read, 0.0
    mw.save_quantized(model, folder / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", dtype=torch.float32)
    return read, largest(logits(exact), logits(theirs))


def differences_of_rival(name: str, folder: Path) -> dict[str, float]:
    """Return the largest difference of logits, transformers' from ours, for each file that llm-compressor writes."""
    found: dict[str, float] = {}
    for dtype, is_float4 in ((torch.float32, False), (torch.bfloat16, True)):
        schemes = {scheme: each for scheme, each in SCHEMES.items() if each.weights.is_float4 == is_float4}
        rival = quantized_by_rival(make(name, dtype), schemes, [IDS] * 4, folder / str(dtype))
        for scheme, written in {} if rival is None else rival.folders.items():
            theirs = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=dtype)
            found[scheme] = largest(logits(theirs), logits(mw.load_quantized(make(name, dtype), written)))
    return found


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def largest(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest difference of logits."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, tuple[float, float]] = {}
    for model in MODELS[: 1 if quick else None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, scheme in SCHEMES.items():
                with tempfile.TemporaryDirectory() as folder:
                    found[f"{model}, {name}"] = differences(model, scheme, Path(folder))
            for name, form in FORMS.items():
                with tempfile.TemporaryDirectory() as folder:
                    found[f"{model}, {name}"] = differences_of_form(model, form, Path(folder))
            with tempfile.TemporaryDirectory() as folder:
                rival = differences_of_rival(model, Path(folder))
        found |= {f"{model}, {name} by llm-compressor": (each, 0.0) for name, each in rival.items()}
    value = max(max(pair) for pair in found.values())
    return {
        "name": "quantize_interop",
        "value": value,
        "goal": "0.0, in the same dtype",
        "ok": value == 0,
        "details": {
            "models": list(MODELS[: 1 if quick else None]),
            "schemes": list(SCHEMES),
            "forms of other libraries": list(FORMS),
            "files of llm-compressor": sum("llm-compressor" in name for name in found) or ABSENT,
            "different": {name: pair for name, pair in found.items() if any(pair)},
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
